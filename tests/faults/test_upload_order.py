"""What is in the bucket first, when the machine may be gone the next moment."""

from __future__ import annotations

from fixtures import remote_parts as parts
from toque.storage.bucket import Bucket


def test_a_step_is_never_in_the_bucket_without_the_best_models_before_it(
    remote, tmp_path, monkeypatch
):
    """Found by `bench/kills.py --upload`: same weights, another finished model."""
    store = parts.made(tmp_path / "a", 4, 6)
    tensors = store.newest_valid().tensors("model")
    store.save(4, {"model": tensors}, {"progress": {"step": 4}}, metrics={"loss": 1.0})
    put, manifests = Bucket.put, []

    def watched(folder, name, data, *, new=False):
        manifests.append(name)
        return put(folder, name, data, new=new)

    monkeypatch.setattr(Bucket, "put", watched)
    parts.upload(tmp_path / "a", remote)
    assert [name for name in manifests if name.endswith("manifest.json")] == [
        "best/step-00000004/manifest.json",
        "checkpoints/step-00000006/manifest.json",
    ]
