"""The public names, each with the module that defines it: the one list of them."""

from .core.errors import CredentialsError as CredentialsError
from .core.errors import DataError as DataError
from .core.errors import DataNotFoundError as DataNotFoundError
from .core.errors import EngineDiedError as EngineDiedError
from .core.errors import GpuPoolError as GpuPoolError
from .core.errors import NoPoolError as NoPoolError
from .core.errors import OptionsError as OptionsError
from .core.errors import PlacementError as PlacementError
from .core.errors import PoolError as PoolError
from .core.errors import PoolStartError as PoolStartError
from .core.errors import SampleError as SampleError
from .core.errors import SpmdError as SpmdError
from .core.errors import StillRunningError as StillRunningError
from .core.errors import TrainingError as TrainingError
from .core.errors import TransferError as TransferError
from .core.options.fields import Profile as Profile
from .core.options.pool_options import PoolOptions as PoolOptions
from .core.options.training_options import TrainingOptions as TrainingOptions
from .data.datastores.images import ImageDatastore as ImageDatastore
from .data.datastores.tar import TarDatastore as TarDatastore
from .data.segmentation.datastore import SegmentationDatastore as SegmentationDatastore
from .engine.checkpoint.files import Checkpoints as Checkpoints
from .engine.checkpoint.networks import load as load
from .engine.checkpoint.networks import save as save
from .engine.checkpoint.weights import load_weights as load_weights
from .engine.numerics.batch_norm import sync_batch_norm as sync_batch_norm
from .engine.own_loop.metrics import Metrics as Metrics
from .engine.own_loop.monitor import Monitor as Monitor
from .engine.own_loop.monitor import monitor as monitor
from .engine.own_loop.sharding import shard_batches as shard_batches
from .engine.own_loop.sharding import weighted_loss as weighted_loss
from .engine.own_loop.step_timer import StepTimer as StepTimer
from .engine.own_loop.step_timer import StepTimes as StepTimes
from .engine.training.callbacks import CallbackInfo as CallbackInfo
from .notebook.extension import load_ipython_extension as load_ipython_extension
from .notebook.extension import unload_ipython_extension as unload_ipython_extension
from .notebook.train import train as train
from .pool.inline import InlinePool as InlinePool
from .pool.pool import Pool as Pool
from .pool.result import SpmdResult as SpmdResult
from .pool.session import current_pool as current_pool
from .pool.session import gpus as gpus
from .pool.session import start as start
from .pool.variables.composite import Composite as Composite
from .pool.variables.composite import Constant as Constant
from .training.confusion import ConfusionMatrix as ConfusionMatrix
from .training.confusion import confusion as confusion
from .training.evaluate import evaluate as evaluate
from .training.head import replace_head as replace_head
from .training.history import TrainingHistory as TrainingHistory
from .training.predict import predict as predict
from .training.result import TrainingResult as TrainingResult
from .training.run import TrainingRun as TrainingRun

__version__: str
__all__: list[str]
