from . import emr as emr
from . import errors as errors
from . import fm_delta as fm_delta
from . import pissa as pissa
from . import storage as storage
from . import trans_lora as trans_lora
from . import uni_med as uni_med
from . import weight_sync as weight_sync
from .emr import EMRConfig as EMRConfig
from .errors import AdapterError as AdapterError
from .errors import BaseModelError as BaseModelError
from .errors import CheckpointError as CheckpointError
from .errors import CorruptFileError as CorruptFileError
from .errors import HfExtError as HfExtError
from .errors import ServerError as ServerError
from .errors import UnsavedChangesError as UnsavedChangesError
from .fm_delta import FMDeltaConfig as FMDeltaConfig
from .pissa import PissaConfig as PissaConfig
from .pissa import QPissaConfig as QPissaConfig
from .trans_lora.config import TransLoraConfig as TransLoraConfig
from .trans_lora.trainer import TransLoraTrainer as TransLoraTrainer
from .uni_med.configuration_uni_med import UniMedConfig as UniMedConfig
from .uni_med.modeling_uni_med import UniMedForConditionalGeneration as UniMedForConditionalGeneration
from .uni_med.processing_uni_med import UniMedProcessor as UniMedProcessor
from .uni_med.upcycling.config import CMoEConfig as CMoEConfig

__version__: str
