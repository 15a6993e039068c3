"""Pictures of known cases, from the shards that the model was trained on, if they are at hand."""

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.paper import last_sample
from ecgmatch_dist.record.config_file import read_config


class KnownSignals:
    """The preprocessed signals of known cases. `why_not`: why there are none; empty: there are."""

    def __init__(self, model: Predictor, shards: str = "") -> None:
        """`shards`: their folder or address; empty: the one in the run's config.json."""
        self.why_not = ""
        self.store: ShardStore | None = None
        try:
            place = shards or str(read_config(model.folder / "config.json").settings["shards"])
            self.store = ShardStore(place, sorted({str(case).partition("/")[0] for case in model.cases.ids}))
            if self.store.preprocess != model.inputs.preprocess:
                raise UserError(f"{place}: made with another preprocessing than the model's")
        except (UserError, KeyError, OSError) as error:
            self.why_not, self.store = str(error), None

    def read(self, case: str) -> NDArray[np.float16] | None:
        """[12, T] of the case `database/key`, without the padding at its end; None: not at hand."""
        if self.store is None:
            return None
        try:
            x: NDArray[np.float16] = self.store.read(self.store.rows([case]))[0]
        except (UserError, OSError):
            return None
        return x[:, : last_sample(x)]
