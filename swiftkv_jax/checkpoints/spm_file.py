"""SentencePiece's tokenizer.model as a tokenizer of the package tokenizers.

The file is the message `ModelProto` of SentencePiece's `sentencepiece_model.proto`. It is read with
protobuf, without the package sentencepiece.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # pieces.type


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """The contents of a tokenizer.model."""

    proto: Any
    """A `ModelProto`."""

    @property
    def prefix(self) -> bool:
        """Return whether texts are encoded with a space before them."""
        return self.proto.normalizer_spec.add_dummy_prefix

    @property
    def added(self) -> dict[int, str]:
        """Id -> text of the tokens that are matched as a whole: control tokens and symbols that
        users defined."""
        pieces = enumerate(self.proto.pieces)
        return {i: piece.piece for i, piece in pieces if piece.type in (_CONTROL, _USER_DEFINED)}

    @property
    def named(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and `unk_token`, as far as the model has them."""
        spec = self.proto.trainer_spec
        count = len(self.proto.pieces)
        ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id}
        return {name: self.proto.pieces[i].piece for name, i in ids.items() if 0 <= i < count}

    def build(self, *, prefix: bool, every_part: bool) -> Tokenizer:
        """The tokenizer, without a post-processor. With `prefix` a space goes before a text, with
        `every_part` also before each part that follows an added token."""
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            normalizers,
            pre_tokenizers,
        )

        tokenizer = Tokenizer(self._pieces())
        spec = self.proto.normalizer_spec
        steps: list[Any] = []
        if spec.precompiled_charsmap:
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        if spec.remove_extra_whitespaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if every_part:
            if prefix:
                steps.append(normalizers.Prepend(_SPACE))
            steps.append(normalizers.Replace(" ", _SPACE))
        else:
            scheme = "first" if prefix else "never"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
        tokenizer.normalizer = normalizers.Sequence(steps)
        parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            parts.append(decoders.Strip(" ", left=1))
        tokenizer.decoder = decoders.Sequence(parts)
        tokenizer.add_tokens(
            [
                AddedToken(text, normalized=False, special=self.proto.pieces[i].type == _CONTROL)
                for i, text in self.added.items()
            ]
        )
        return tokenizer

    def _pieces(self) -> Any:
        """The model of the package tokenizers: byte pairs or a unigram model."""
        from tokenizers import models

        spec = self.proto.trainer_spec
        pieces = self.proto.pieces
        if spec.model_type == _UNIGRAM:
            scored = [(piece.piece, piece.score) for piece in pieces]
            return models.Unigram(scored, spec.unk_id, spec.byte_fallback)
        ids = {piece.piece: i for i, piece in enumerate(pieces)}
        scores = {
            piece.piece: piece.score for piece in pieces if piece.type in (_NORMAL, _USER_DEFINED)
        }
        # SentencePiece joins the two neighbours whose piece has the highest score, the first two
        # where several have: in runs of spaces a long left one comes before a short one.
        merges = [
            (-score, -len(left), -len(right), left, right)
            for piece, score in scores.items()
            for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            if left in scores and right in scores
        ]
        pairs = [(left, right) for *_, left, right in sorted(merges)]
        unknown = pieces[spec.unk_id].piece
        return models.BPE(
            ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback
        )


def read_model_file(content: bytes) -> ModelFile:
    """Parse a tokenizer.model. Raises `CheckpointError` if it is not SentencePiece's, or if its
    kind of model is neither byte pairs nor unigrams."""
    try:
        from transformers.convert_slow_tokenizer import import_protobuf

        messages: Any = import_protobuf()
    except ImportError:
        raise CheckpointError(
            "tokenizer.model: reading SentencePiece's format needs protobuf: pip install "
            "sentencepiece protobuf"
        ) from None
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(content)
    except Exception:  # protobuf's DecodeError
        raise CheckpointError(
            "tokenizer.model: not a SentencePiece model, and there is no tokenizer.json beside it; "
            "get the model's tokenizer.json"
        ) from None
    if not proto.pieces or proto.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise CheckpointError(
            "tokenizer.model: a SentencePiece model of words or characters is not supported; get "
            "the model's tokenizer.json"
        )
    return ModelFile(proto)
