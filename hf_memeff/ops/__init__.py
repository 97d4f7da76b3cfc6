"""The maths of the project: tensors in, tensors out. Shape letters are those of ``README.md`` beside this file."""
