from .adapters import report as report
from .combination import add_weighted_adapter as add_weighted_adapter
from .config import PissaConfig as PissaConfig
from .config import QPissaConfig as QPissaConfig
from .conversion import LoraConversion as LoraConversion
from .conversion import convert_to_lora as convert_to_lora
from .kinds import accept_pissa as accept_pissa
from .reports import PissaReport as PissaReport
