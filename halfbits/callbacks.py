"""`watch` where others own the loop: a callback for the Trainer of Transformers, and one for Lightning.

    from halfbits.callbacks import TrainerWatch

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TrainerWatch()])
    trainer.train()  # raises NonFinite at the first bad number; prints the verdict at the end

`LightningWatch` is used in the same way, in `lightning.Trainer(callbacks=[LightningWatch()])`. The watch is `seen`.
Each class is made when it is first asked for, so that the other library need not be installed.
"""

import importlib

from halfbits.watching import watch


def _trainer_watch():
    class TrainerWatch(importlib.import_module("transformers").TrainerCallback):
        """Watches what a Transformers Trainer trains. The options are those of `watch`.

        If the training ends by an error, call `seen.stop()`; the Trainer does not tell its callbacks of that.
        """

        def __init__(self, **options):
            self.options, self.seen = options, None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            if self.seen is not None:
                self.seen.stop()
            self.seen = watch(model, optimizer, **self.options).start()

        def on_train_end(self, args, state, control, **_):
            self.seen.stop()
            print(self.seen)

    return TrainerWatch


def _lightning_watch():
    class LightningWatch(importlib.import_module("lightning").Callback):
        """Watches what Lightning fits. The options are those of `watch`."""

        def __init__(self, **options):
            self.options, self.seen = options, None

        def on_train_start(self, trainer, pl_module):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self.seen = watch(pl_module, list(trainer.optimizers), scaler, **self.options).start()

        def on_train_end(self, trainer, pl_module):
            self.seen.stop()
            print(self.seen)

        def on_exception(self, trainer, pl_module, exception):
            if self.seen is not None:
                self.seen.__exit__(type(exception), exception, exception.__traceback__)

    return LightningWatch


def __getattr__(name):
    makers = {"TrainerWatch": _trainer_watch, "LightningWatch": _lightning_watch}
    if name not in makers:
        raise AttributeError(f"module 'halfbits.callbacks' has no attribute {name!r}; it has {', '.join(makers)}")
    globals()[name] = makers[name]()
    return globals()[name]
