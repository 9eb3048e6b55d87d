"""The training room of MoEMB, imported as `moemb.trainers`: data, training, evaluation, conversion, the command.

Nothing is imported here, so that `moemb --help` and a single verb stay quick; import the module you need, for example
`from moemb.trainers.convert import convert_checkpoint`.
"""
