"""Any Llama checkpoint: --config=configs/auto.py:PATH takes every architecture field from PATH/config.json."""

from configs import common


def get_config(path=None):
    if not path:
        raise ValueError("configs/auto.py needs the checkpoint's folder: --config=configs/auto.py:PATH")
    c = common.get_config()
    c.checkpoint = path
    return c
