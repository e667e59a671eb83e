"""The `hf-ext` command, a module for each method. Heavy libraries are imported only by the commands that need them."""
