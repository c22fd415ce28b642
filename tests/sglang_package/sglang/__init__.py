"""In the place of SGLang, which needs a GPU: its main module starts ``tests.sglang_server``."""
