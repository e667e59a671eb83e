from .memory import Piece as Piece
from .places import Place as Place
from .publisher import Publisher as Publisher
from .publisher import Rows as Rows
from .servers import VLLMServer as VLLMServer
from .servers import follow as follow
from .subscriber import Subscriber as Subscriber
from .training import PublishWeights as PublishWeights
