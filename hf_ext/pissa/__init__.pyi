from .config import PissaConfig as PissaConfig
from .config import QPissaConfig as QPissaConfig
