from maskrcnn_trt.model.manifest import read_manifest, verified_path


def test_bundle_holds_what_its_manifest_names(bundle):
    manifest = read_manifest(bundle)
    assert manifest.class_names == ("disc", "box", "ring")
    assert {str(a.bucket) for a in manifest.artifacts_for("fp32")} == {"96x160", "160x96"}
    for artifact in manifest.artifacts:
        assert verified_path(bundle, artifact).is_file()
