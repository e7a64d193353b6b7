"""The shared library of pocketgpt. It never imports a top-level script."""
