"""Decoder families, one file each, named after transformers' `model_type`."""
