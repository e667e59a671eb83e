"""hf_ext: methods for fine-tuning, merging, shipping and serving models, as a plugin for Transformers and PEFT.

Public names load when they are first used; `__init__.pyi` lists them. The import itself loads no other library.
"""

import lazy_loader

from hf_ext.integration import versions
from hf_ext.registration import register

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

versions.check()
register()
