"""Weight sync: the weights of every training step reach inference servers as lossless deltas (FM-Delta, NeurIPS 2024).

A `Publisher` writes the changes of each step to a place (a folder, a Hub repository or bucket, any object store). A
`Subscriber` updates tensors in memory from any step to the newest. Neither needs Transformers. docs/weight_sync.md shows
examples.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
