"""Options under the names of MATLAB's `trainingOptions` and of others. Runs anywhere.

Source: https://www.mathworks.com/help/deeplearning/ref/trainingoptions.html
"""

from __future__ import annotations

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

# names that Keras, Lightning and Hugging Face use -> ours
OTHERS = {
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "lr_scheduler": "schedule",
    "gradient_clip_val": "clip",
    "max_grad_norm": "clip",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "per_device_train_batch_size": "batch_size",
    "sync_batchnorm": "batch_norm",
    "early_stopping": "patience",
}

_COLLATE = "sequences are padded by the data set: return samples of equal length."
_TRANSFORM = "give the data set a transform that returns what the network takes."

# MATLAB's name -> what to do instead, where there is no option
ELSEWHERE = {
    "ValidationData": "give train(..., validation=...) the data set.",
    "SequenceLength": _COLLATE,
    "SequencePaddingDirection": _COLLATE,
    "SequencePaddingValue": _COLLATE,
    "InputDataFormats": _TRANSFORM,
    "TargetDataFormats": _TRANSFORM,
    "CategoricalInputEncoding": _TRANSFORM,
    "CategoricalTargetEncoding": _TRANSFORM,
    "PreprocessingEnvironment": "reading ahead in the background is always on.",
    "DispatchInBackground": "reading ahead in the background is always on.",
}

# our option -> MATLAB's word -> ours
WORDS = {
    "optimizer": {"sgd": "sgdm"},
    "keep": {
        "best-validation": "best",
        "best-validation-loss": "best",
        "last-iteration": "last",
    },
    "progress": {"training-progress": "plot"},
    "execution": {"parallel": "parallel-auto"},
    "precision": {"single": "float32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"},
    "schedule": {"constant": "none"},
}
