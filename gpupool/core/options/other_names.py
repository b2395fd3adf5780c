"""Names that MATLAB, Keras, Lightning, Hugging Face and others have for ours. Runs anywhere.

Who gives one of them is answered with ours: `answer` looks names up without regard to capital
letters and underscores, as one has `num_epochs` and the other `NumEpochs`.

Source for MATLAB: https://www.mathworks.com/help/deeplearning/ref/trainingoptions.html
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

# MATLAB's name -> ours
NAMES = {
    "InitialLearnRate": "lr",
    "MiniBatchSize": "batch_size",
    "MaxEpochs": "epochs",
    "MaxIterations": "max_steps",
    "L2Regularization": "weight_decay",
    "Momentum": "momentum",
    "GradientDecayFactor": "betas",
    "SquaredGradientDecayFactor": "betas",
    "Epsilon": "eps",
    "LearnRateSchedule": "schedule",
    "LearnRateDropFactor": "drop_factor",
    "LearnRateDropPeriod": "drop_period",
    "Shuffle": "shuffle",
    "ValidationFrequency": "validate_every",
    "ValidationPatience": "patience",
    "OutputNetwork": "keep",
    "ObjectiveMetricName": "objective",
    "Metrics": "metrics",
    "BatchNormalizationStatistics": "bn_statistics",
    "GradientThreshold": "clip",
    "GradientThresholdMethod": "clip_method",
    "ResetInputNormalization": "normalize",
    "ExecutionEnvironment": "execution",
    "WorkerLoad": "rank_load",
    "CheckpointPath": "checkpoint",
    "CheckpointFrequency": "checkpoint_every",
    "CheckpointFrequencyUnit": "checkpoint_every",
    "OutputFcn": "callbacks",
    "Plots": "progress",
    "Verbose": "progress",
    "VerboseFrequency": "log_every",
    "Acceleration": "compile",
}

# our option -> what Keras, Lightning, Hugging Face, fastai and torch's own scripts call it
_ALSO = {
    "optimizer": "optim optimizers solver solver_name optimizer_type opt optimizer_cls",
    "lr": "learning_rate learn_rate initial_lr base_lr lr0 max_lr eta step_rate learning_rate_init",
    "betas": "beta1 beta2 adam_beta1 adam_beta2",
    "eps": "adam_epsilon optimizer_eps",
    "alpha": "rho",
    "weight_decay": "wd l2 l2_reg weight_decay_rate decay",
    "learn_rate_factors": "lr_multipliers lr_factors freeze frozen freeze_backbone freeze_layers",
    "schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule learning_rate_schedule sched "
    "lr_policy scheduler_type lr_scheduler_kwargs milestones",
    "drop_factor": "gamma lr_decay decay_rate",
    "drop_period": "step_size decay_steps lr_step_size decay_epochs",
    "warmup": "warmup_steps warmup_epochs warmup_ratio num_warmup_steps lr_warmup_epochs pct_start",
    "warmup_factor": "warmup_lr warmup_decay start_factor",
    "min_factor": "min_lr eta_min end_factor",
    "cycle_period": "T_0 T_max num_cycles step_size_up",
    "epochs": "num_train_epochs num_epochs n_epochs nb_epoch n_epoch train_epochs",
    "max_steps": "max_iter max_iters iterations num_steps total_steps num_train_steps n_steps",
    "workers": "num_workers dataloader_num_workers",
    "batch_size": "per_device_train_batch_size train_batch_size global_batch_size bs batch "
    "per_gpu_train_batch_size",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps "
    "grad_accum_steps",
    "weights": "sampler sample_weights sampling_weights weighted_sampler",
    "bucket_by": "group_by_length length_column_name bucketing bucket_sampler",
    "batch_sampler": "train_sampler",
    "seed": "random_state random_seed manual_seed data_seed",
    "clip": "gradient_clip_val max_grad_norm clipnorm clipvalue global_clipnorm grad_clip "
    "gradient_clip clip_grad_norm clip_grad",
    "clip_method": "gradient_clip_algorithm clip_mode",
    "precision": "amp use_amp fp16 bf16 mixed_precision half half_precision_backend dtype",
    "compile": "torch_compile jit_compile compile_model torch_compile_mode",
    "batch_norm": "sync_batchnorm sync_bn convert_sync_batchnorm",
    "ema": "ema_decay use_ema model_ema ema_momentum model_ema_decay",
    "deterministic": "full_determinism use_deterministic_algorithms reproducible",
    "normalize": "normalization",
    "validate_every": "eval_steps eval_strategy evaluation_strategy val_check_interval "
    "check_val_every_n_epoch validation_freq eval_every val_interval eval_interval",
    "metrics": "compute_metrics metric",
    "objective": "metric_for_best_model monitor early_stopping_metric",
    "keep": "load_best_model_at_end restore_best_weights save_best_only save_best",
    "patience": "early_stopping early_stopping_patience early_stop early_stopping_rounds",
    "min_delta": "early_stopping_threshold threshold tolerance tol",
    "drop_patience": "lr_patience plateau_patience scheduler_patience",
    "on_divergence": "terminate_on_nan detect_nan",
    "collate": "collate_fn data_collator",
    "step": "training_step train_step",
    "checkpoint": "save_dir output_dir default_root_dir checkpoint_dir filepath model_dir "
    "dirpath save_path weights_save_path logging_checkpoint",
    "checkpoint_every": "save_steps save_strategy save_freq save_every every_n_epochs "
    "every_n_train_steps save_interval checkpoint_interval enable_checkpointing",
    "num_checkpoints": "save_total_limit save_top_k max_to_keep keep_checkpoint_max",
    "resume": "resume_from_checkpoint ckpt_path resume_from initial_epoch start_epoch "
    "checkpoint_resume",
    "overwrite": "overwrite_output_dir exist_ok overwrite_checkpoints force",
    "log_every": "logging_steps log_every_n_steps log_interval print_every print_freq "
    "logging_strategy",
    "progress": "enable_progress_bar disable_tqdm show_progress progress_bar display verbosity "
    "progress_bar_refresh_rate",
    "tensorboard": "log_dir logging_dir tensorboard_dir tb_log_dir",
    "profile": "profiler profile_batch",
    "callbacks": "callback hooks on_epoch_end",
    "execution": "execution_mode",
}
OTHERS = {name: ours for ours, names in _ALSO.items() for name in names.split()}

_DEVICES = (
    "the pool has the devices: `%gpupool start --gpus 0,1` or `-n 2` starts it, and "
    "execution='gpu', 'cpu' or 'parallel-auto' says which of its ranks train."
)
_SHARDED = (
    "train() gives each rank the whole network. FSDP and tensor parallelism run in a loop of your "
    "own, in a %%spmd cell."
)
_POOL = "it belongs to the pool: `%gpupool start` takes it; `%gpupool help` shows how."
_LOSS = "the loss is the third argument of train: train(model, dataset, 'cross_entropy')."
_LOSS_MODULE = (
    "give the loss itself, as train(model, dataset, "
    "torch.nn.CrossEntropyLoss(label_smoothing=0.1))."
)
_VALIDATION = "give the data set as train(..., validation=...)."
_SPLIT = (
    "split the data before: ds.split_each_label(0.9), or torch.utils.data.random_split, and "
    "train(..., validation=...)."
)
_DATA = "the data set is the second argument of train: train(model, dataset)."
_MODEL = "the network is the first argument of train: train(model, dataset)."
_WAIT = "it is an argument of train: train(..., wait=False)."
_BACKGROUND = "reading ahead in the background is always on."
_LAST_BATCH = "nothing is dropped: the last batch may be smaller, and each sample counts once."
_WHOLE_EPOCH = "an epoch is the whole data set; max_steps=... ends training sooner."
_OWN_OPTIMIZER = (
    "give the optimizer as a function: optimizer=lambda groups: torch.optim.Adam(groups, "
    "amsgrad=True)."
)
_SEQUENCES = "give a function that pads the sequences of a batch: collate=function."
_TRANSFORM = "give the data set a transform that returns what the network takes."
_LOGGER = "a callback gets every value: callbacks=[lambda info: ...]; tensorboard='runs' is there."
_HUB = "result.model is a network of the same class: call its push_to_hub after training."
_DIRECTION = "the name of `objective` says it: of a loss or an error less is better, else more."

# what there is to do instead, where there is no option -> the names that are answered so
_ADVICE = {
    _DEVICES: "devices gpus num_gpus n_gpus n_gpu num_nodes accelerator device no_cuda use_cpu "
    "use_cuda cuda use_mps_device local_rank world_size nproc_per_node auto_select_gpus tpu_cores "
    "num_devices gpu num_processes num_machines distribute_strategy workers_per_node",
    _SHARDED: "fsdp strategy fsdp_config deepspeed tensor_parallel pipeline_parallel parallelism "
    "plugins model_parallel zero_stage distribution parallelism_config",
    _POOL: "backend ddp_backend ddp_timeout process_group_backend timeout_s idle_timeout on_hang",
    "DistributedDataParallel finds parameters without a gradient in the first step.": (
        "find_unused_parameters ddp_find_unused_parameters ddp"
    ),
    "the samples are dealt out to the ranks in any case.": (
        "use_distributed_sampler replace_sampler_ddp distributed_sampler"
    ),
    _LOSS: "loss criterion loss_fn loss_function loss_fcn compute_loss_func loss_func objective_fn",
    _LOSS_MODULE: "class_weight class_weights sample_weight label_smoothing "
    "label_smoothing_factor loss_weights",
    _VALIDATION: "ValidationData validation val_data eval_dataset val_dataloaders val_dataset "
    "valid_dataset validation_dataset val_dataloader eval_data test_data",
    _SPLIT: "validation_split val_split train_test_split validation_fraction",
    _DATA: "dataset data train_dataset train_data train_dataloader train_dataloaders x y "
    "training_data dataloader train_loader",
    _MODEL: "model net network module",
    _WAIT: "wait block asynchronous",
    _BACKGROUND: "persistent_workers prefetch_factor pin_memory "
    "dataloader_pin_memory max_queue_size use_multiprocessing prefetch "
    "PreprocessingEnvironment DispatchInBackground dataloader_prefetch_factor",
    _LAST_BATCH: "drop_last drop_last_batch dataloader_drop_last drop_remainder",
    _WHOLE_EPOCH: "steps_per_epoch limit_train_batches fast_dev_run overfit_batches "
    "limit_val_batches validation_steps num_sanity_val_steps",
    "a callback that returns True ends training.": "max_time min_epochs min_steps time_limit",
    _OWN_OPTIMIZER: "amsgrad dampening centered foreach fused maximize capturable "
    "differentiable optim_args optimizer_kwargs",
    _TRANSFORM: "InputDataFormats TargetDataFormats CategoricalInputEncoding "
    "CategoricalTargetEncoding transform transforms augmentation augment image_size "
    "target_transform",
    _SEQUENCES: "SequenceLength SequencePaddingDirection SequencePaddingValue padding max_length",
    _LOGGER: "logger report_to run_name wandb loggers project_name experiment_name log_model",
    _HUB: "push_to_hub hub_model_id hub_token hub_strategy",
    _DIRECTION: "greater_is_better mode",
    "gpupool.replace_head(model, num_classes) gives the network a head for them.": (
        "num_classes num_labels n_classes"
    ),
    "a Hugging Face model has gradient_checkpointing_enable(); others call "
    "torch.utils.checkpoint in their forward.": "gradient_checkpointing activation_checkpointing",
    "validation and prediction choose theirs: the batch size changes no value.": (
        "per_device_eval_batch_size eval_batch_size val_batch_size validation_batch_size"
    ),
}
ELSEWHERE = {name: advice for advice, names in _ADVICE.items() for name in names.split()}

# of `%gpupool start` and gpupool.start: another name -> ours
POOL = {
    name: ours
    for ours, names in {
        "n": "num_workers workers world_size nproc nproc_per_node num_ranks num_processes n_ranks "
        "num_engines",
        "gpus": "devices device_ids gpu_ids visible_devices CUDA_VISIBLE_DEVICES gpu",
        "device": "accelerator cpu",
        "env": "environment EnvironmentVariables env_vars",
        "idle_timeout": "IdleTimeout timeout",
        "profile": "cluster resources ResourceName",
    }.items()
    for name in names.split()
}

# of a datastore: another name -> ours
DATASTORE = {
    "LabelSource": "labels",
    "FileExtensions": "extensions",
    "class_names": "classes",
    "classNames": "classes",
    "pixelLabelIDs": "classes",
    "root": "url",
    "location": "url",
    "directory": "url",
    "path": "url",
}
_WITH_TRANSFORM = "`.with_transform(f)` of the datastore applies f to each image."
_OF_TRAINING = "it is an option of train: train(model, ds, {}=...)."
DATASTORE_ELSEWHERE = {
    "IncludeSubfolders": "folders below `url` are always read, with theirs.",
    "ReadFcn": _WITH_TRANSFORM,
    "loader": _WITH_TRANSFORM,
    "transform": _WITH_TRANSFORM,
    "transforms": _WITH_TRANSFORM,
    "target_transform": "`labels` may be a function from an image's URL to its label.",
    "DataAugmentation": _WITH_TRANSFORM,
    "image_size": _WITH_TRANSFORM,
    "OutputSize": _WITH_TRANSFORM,
    "ReadSize": _OF_TRAINING.format("batch_size"),
    "batch_size": _OF_TRAINING.format("batch_size"),
    "MiniBatchSize": _OF_TRAINING.format("batch_size"),
    "shuffle": _OF_TRAINING.format("shuffle"),
    "seed": _OF_TRAINING.format("seed"),
    "num_workers": _BACKGROUND,
    "validation_split": "`.split_each_label(0.9)` of the datastore splits it.",
    "AlternateFileSystemRoots": "`.relist()` of the datastore lists another time.",
    "PatchesPerImage": "`.random_patches(size, per_image=8)` of the datastore cuts patches.",
    "patch_size": "`.random_patches(size, per_image=8)` of the datastore cuts patches.",
}

# our option -> another word -> ours
WORDS: dict[str, dict[Any, str]] = {
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "momentum": "sgdm"},
    "keep": {
        "best-validation": "best",
        "best-validation-loss": "best",
        "last-iteration": "last",
    },
    "progress": {"training-progress": "plot", True: "plot", False: "none"},
    "execution": {"parallel": "parallel-auto", "cuda": "gpu", "auto-gpu": "auto"},
    "precision": {
        "single": "float32",
        "half": "fp16",
        "float16": "fp16",
        "bfloat16": "bf16",
        "32": "float32",
        "32-true": "float32",
        "16": "fp16",
        "16-mixed": "fp16",
        "bf16-mixed": "bf16",
        "mixed_float16": "fp16",
        "mixed_bfloat16": "bf16",
        "no": "float32",
        16: "fp16",
        32: "float32",
    },
    "shuffle": {True: "every-epoch", False: "never", "batch": "every-epoch"},
    "normalize": {True: "fit", False: "none"},
    "batch_norm": {True: "sync", False: "local"},
    "schedule": {
        "constant": "none",
        "step": "piecewise",
        "linear": "polynomial",
        "poly": "polynomial",
        "cosine_annealing": "cosine",
        "reduce_on_plateau": "plateau",
        "reduce_lr_on_plateau": "plateau",
        "ReduceLROnPlateau": "plateau",
    },
}


def answer(
    name: str,
    known: Iterable[str],
    others: Mapping[str, str],
    elsewhere: Mapping[str, str],
    where: str,
    of: str = "",
) -> str:
    """The error's sentence for a name that is not among the options `known`.

    Args:
        others: another name -> the one of `known` that is meant.
        elsewhere: a name -> what there is to do, where there is no option.
        where: where all options are shown; said where nothing is near.
        of: whose options they are, as " of ImageDatastore".
    """
    plain, key = {_plain(one): one for one in known}, _plain(name)
    said = f"{name!r} is not an option{of}"
    meant = plain.get(key) or _plainly(others).get(key)
    if meant in plain.values():
        return f"{said}. Did you mean {meant!r}?"
    if key in (advice := _plainly(elsewhere)):
        return f"{said}: {advice[key]}"
    near = difflib.get_close_matches(key, plain, 2, 0.75) or difflib.get_close_matches(
        key, plain, 1
    )
    if near:
        return f"{said}. Did you mean {' or '.join(repr(plain[one]) for one in near)}?"
    return f"{said}; {where}"


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _plainly(names: Mapping[str, str]) -> dict[str, str]:
    return {_plain(name): value for name, value in names.items()}
