"""Bugs planted one by one, each of which the tests of `make test` have to find."""
