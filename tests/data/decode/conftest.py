import pytest
from decoding import needs_native

from vit.data.decode import native
from vit.data.decode.images import decoder_name


@pytest.fixture(params=["simplejpeg", pytest.param("native", marks=needs_native)])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        monkeypatch.setattr(native, "AVAILABLE", False)
    assert decoder_name() == request.param
    return request.param
