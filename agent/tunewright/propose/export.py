"""The trials as a study in any Optuna storage, for the dashboards that people know: a copy, never read back."""

from collections.abc import Sequence

import optuna

from tunewright.domain.state import TrialRecord, TuningRecord
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.ports import Refused

_UNSET = "default"


def export_study(record: TuningRecord, trials: Sequence[TrialRecord], *, storage: str, study_name: str) -> int:
    """Write every ended trial to a new study of that name; how many were written.

    `storage` is an Optuna URL, as `sqlite:///study.db`. Every knob that any trial set is a parameter; `default` where a
    trial leaves it out. Raises `Refused` when the study is there already, or the storage can't be used.
    """
    try:
        study = optuna.create_study(storage=storage, study_name=study_name, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError:
        raise Refused(f"{storage} already has a study {study_name}: name another one with --study") from None
    except Exception as error:  # noqa: BLE001 - Optuna passes on whatever its storage's driver raises
        raise Refused(f"Optuna can't use the storage {storage}: {error}") from None
    study.set_user_attr("tuning", record.name)
    study.set_user_attr("spec", record.spec_hash)
    ended = [trial for trial in trials if trial.outcome is not None]
    names = [name for name in CATALOGUE if any(name in trial.candidate.values for trial in ended)]
    choices = {name: _texts(name, ended) for name in names}
    for trial in ended:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if trial.objective is not None else optuna.trial.TrialState.FAIL,
                value=trial.objective,
                params={name: _text(name, trial) for name in names},
                distributions={name: optuna.distributions.CategoricalDistribution(choices[name]) for name in names},
                user_attrs={
                    "id": trial.id,
                    "purpose": trial.purpose.value,
                    "reason": trial.reason,
                    "outcome": trial.outcome.value if trial.outcome is not None else "",
                    "failure": trial.failure.cause if trial.failure is not None else "",
                    "stopped": trial.stopped or "",
                    "slo_margin": trial.slo_margin,
                },
            )
        )
    return len(ended)


def _text(name: str, trial: TrialRecord) -> str:
    value = trial.candidate.values.get(name)
    return _UNSET if value is None else CATALOGUE[name].format(value)


def _texts(name: str, trials: Sequence[TrialRecord]) -> list[str]:
    return list(dict.fromkeys(_text(name, trial) for trial in trials))
