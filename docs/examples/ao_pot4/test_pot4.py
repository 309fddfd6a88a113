from ao_core.testing import DTypeSuite


class TestPot4(DTypeSuite):
    dtype = "pot4"
