"""All code that depends on internals of Transformers and PEFT."""
