from ao_core.caches import cache_folder


def test_below_what_the_variable_names_or_where_the_platform_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    assert cache_folder("times") == tmp_path / "times"
    for value in ("", None):
        monkeypatch.setenv("AO_CACHE", "") if value == "" else monkeypatch.delenv("AO_CACHE")
        assert cache_folder("times").parts[-2:] == ("ao", "times")
