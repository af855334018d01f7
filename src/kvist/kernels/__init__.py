"""The operations below attention: one Python function each, native or reference."""
