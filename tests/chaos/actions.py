"""The actions of a walk, and how often each is chosen."""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos import faults, programs, variables
from tests.chaos.walk import Walk

ACTIONS: dict[Callable[[Walk], None], float] = {
    variables.assign: 4,
    variables.assign_on_some: 2,
    variables.assign_here: 4,
    variables.read: 5,
    variables.call: 3,
    variables.delete: 1,
    variables.change_here: 3,
    variables.change_there: 3,
    variables.change_own: 3,
    variables.take_large: 2,
    variables.use_import: 3,
    variables.sync: 3,
    variables.read_what_is_lost: 2,
    faults.raise_on_one: 4,
    faults.raise_on_all: 2,
    faults.stop: 6,
    faults.stop_idle: 1,
    faults.exceed_time: 2,
    faults.run_in_background: 2,
    faults.leave_on_one: 2,
    faults.kill_idle: 4,
    faults.kill_busy: 4,
    faults.terminate: 2,
    faults.crash: 3,
    faults.pause: 2,
    faults.freeze: 0.7,
    faults.kill_what_all_need: 1,
    faults.restart: 3,
    faults.kill_in_restart: 2,
    faults.new_pool: 1,
    programs.flood: 2,
    programs.start_children: 2,
    programs.use_subgroup: 3,
    programs.break_stdout: 3,
    programs.train: 2,
    programs.stop_training: 1,
    programs.second_notebook: 0.7,
}
