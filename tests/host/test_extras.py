"""The command that installs an extra is true wherever hotbed comes from."""

from importlib.metadata import PackageNotFoundError

from hotbed.host import extras


def test_the_packages_of_an_extra_are_named(monkeypatch):
    listed = [
        "numpy>=1",
        "orjson>=3 ; extra == 'serve'",
        'uvloop>=0.20; platform_system != "Windows" and extra == "serve"',
    ]
    monkeypatch.setattr(
        extras, "requires", lambda name: [*listed, "onnx; extra == 'onnx'", "hotbed[onnx]; extra == 'serve'"]
    )
    assert extras.how_to_install("serve") == "pip install 'orjson>=3' 'uvloop>=0.20'"


def test_without_an_installed_package_the_clone_is_named(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    assert extras.how_to_install("onnx") == "in a clone of hotbed: pip install '.[onnx]'"
