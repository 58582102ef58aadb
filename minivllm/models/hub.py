"""Models of a hub: found in the hub's own cache, or fetched into it.

Knows the hub's client and its errors. Must not know what is in a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.errors import ModelError
from minivllm.models.progress import Progress


def hub_folder_here(name: str) -> Path | None:
    """Return the folder of a hub model that was fetched before, without asking the network."""
    from huggingface_hub.errors import LocalEntryNotFoundError
    from mlx_lm.utils import hf_repo_to_path

    try:
        return Path(hf_repo_to_path(name))
    except (LocalEntryNotFoundError, ValueError):
        return None


def fetch_from_hub(name: str, progress: Progress | None) -> Path:
    """Fetch a hub model's files into the hub's own cache. Raises ModelError: a sentence for each failure."""
    import mlx_lm.utils as mlx_lm_utils  # before huggingface_hub: it quietens it
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    what = f"downloading {name}"

    class SilentBar(tqdm):
        """The hub's progress bar, drawn nowhere; the one that counts bytes reports them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**kwargs, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if progress is not None and self._counts_bytes:
                progress(what, int(self.n), int(self.total) if self.total else None)
            return shown

    if progress is not None:
        progress(what, 0, None)
    try:
        folder = snapshot_download(name, allow_patterns=mlx_lm_utils.DEFAULT_ALLOW_PATTERNS, tqdm_class=SilentBar)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model {name!r} is gated: accept its license on its page at the hub, log in with "
            "`hf auth login`, and try again."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"the hub has no model {name!r} that you may see; check how it is spelled.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"model {name!r} is not on this machine and the hub cannot be reached; check the network, "
            "or use smollm2 or tiny."
        ) from error
    except Exception as error:  # many kinds of HTTP and disk errors
        raise ModelError(
            f"model {name!r} cannot be fetched from the hub ({one_line(error)}); try again, or use smollm2 or tiny."
        ) from error
    return Path(folder)


class _Nowhere:
    """A text stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept, so nothing is flushed."""


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
