"""Weight sync: the weights of every training step reach inference servers as lossless deltas (FM-Delta, NeurIPS 2024).

A `Publisher` writes to a place (a folder, a Hub repository or bucket, any object store) what each step changed; a `Subscriber`
brings tensors in memory from any step to the newest. Neither needs Transformers. docs/weight_sync.md shows both in use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
