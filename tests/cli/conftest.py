import pytest
from cli_models import tiny, write_folder, write_gguf, write_tokens


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with ``model/`` (Hugging Face), ``model.gguf`` (Qwen3) and ``tokens.npz:text``."""
    root = tmp_path_factory.mktemp("cli")
    write_folder(root / "model", tiny())
    write_gguf(root / "model.gguf", tiny(1, model_type="qwen3"))
    write_tokens(root / "tokens.npz")
    return root
