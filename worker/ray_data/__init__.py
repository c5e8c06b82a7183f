"""Ray Data: chats and scores of the rows of a data set that lives on a Ray cluster.

    from worker.ray_data import EnginePredictor, predict

Imports neither Ray nor torch: the driver needs no torch, and the actors import it.
"""

from worker.ray_data.predict import predict
from worker.ray_data.predictor import EnginePredictor

__all__ = ["EnginePredictor", "predict"]
