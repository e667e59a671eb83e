from .config import CMoEConfig as CMoEConfig
