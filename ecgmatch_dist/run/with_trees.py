"""The network of a finished run and the trees that it has asked answer together: `ecgmatch predict --trees`."""

from collections.abc import Mapping

from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.trees_file import why_not_saved
from ecgmatch_dist.metrics import best_thresholds, compute_metrics
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.second_opinion import Together, begin_anew, folder_of, save_opinion
from ecgmatch_dist.run.run import Run


def answer_with_trees(run: Run, network: Mapping[str, Predictions]) -> str:
    """Measure how the network's predictions of validation and test do with the trees', and write the folder `opinion`. Returns
    words for the log. The share of the trees and the thresholds come from the validation part. A collective."""
    opinion = run.second_opinion(saved=True)
    both = {"validation": opinion.weigh_beside(network["validation"])}
    both["test"] = opinion.beside(network["test"], "test")
    thresholds = best_thresholds(both["validation"].labels, both["validation"].probabilities)
    measured = {
        part: compute_metrics(found.labels, found.probabilities, thresholds, run.classes)
        for part, found in both.items()
    }
    if run.ranks.main:
        run.folder.fence.check()
        begin_anew(run.folder.path)
    trees = opinion.trees
    if wrong := why_not_saved(trees.forests, len(trees.public.forests.trees) if trees.public else 0):
        run.logger.say(f"the trees have no file ({wrong}): `predict --trees` cannot ask them")
        return ""
    if run.ranks.main:
        folder = RunFolder(folder_of(run.folder.path))
        folder.fence = run.folder.fence
        for part, found in both.items():
            folder.save_predictions(part, run.parts.ids(part), found)
        together = Together(
            share=opinion.share,
            thresholds=tuple(thresholds.tolist()),
            validation=measured["validation"],
            test=measured["test"],
        )
        save_opinion(run.folder.path, trees, run.classes, together, run.folder.fence.write)
    test = measured["test"]
    return f"; with its trees ({opinion.share:.0%}): MAP {test.map:.4f}, macro AUC {test.macro_auc:.4f}"
