"""Students of models that people use, beside their teachers, on text and on tasks that read the
prompt."""
