"""Loading with `from_pretrained`: which file's tensor becomes which weight, and payloads that are decoded on the way."""
