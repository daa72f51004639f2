from .export.bundle import bundle_from_checkpoint as export_bundle
from .serving.offline import Detector as Detector
from .training.config import load_config as load_config
from .training.run import run_training as train

__all__ = ["Detector", "export_bundle", "load_config", "train"]
__version__: str
