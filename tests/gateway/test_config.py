"""Variables that hold keys of nodes, and locations of databases."""

import re
from pathlib import Path

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.config import load
from cortex.gateway.configuration_files import ConfigurationFiles
from cortex.gateway.created_models import CreatedModels
from cortex.settings import SettingsError


def test_variables_that_hold_keys_of_nodes_are_no_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text("[[neurons]]\nname = 'beast'\nendpoint = 'http://beast:13131'\nkey_env = 'CORTEX_BEAST_KEY'")
    load(path, {"CORTEX_BEAST_KEY": "x", "CORTEX_URL": "http://elsewhere"})
    with pytest.raises(SettingsError, match="unknown environment variable CORTEX_ATTIC_KEY"):
        load(path, {"CORTEX_ATTIC_KEY": "x"})


@pytest.mark.parametrize("section", ["ledger", "responses"])
def test_database_of_another_kind_is_rejected_without_its_password(tmp_path: Path, section: str) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(f"[{section}]\ndatabase = 'mysql://cortex:secret@db/cortex'")
    with pytest.raises(SettingsError, match=rf"{section}.*cortex.toml line .*got `mysql://…`") as rejected:
        load(path, {})
    assert "secret" not in str(rejected.value)


@pytest.mark.parametrize("key", ["nk-one\nnk-two", "nk-one\r\nnk-two", "nk one", "nk-schlüssel", "nk\x00"])
@pytest.mark.parametrize("text", ["[gateway]\nnode_key_env = 'KEY'", "[[neurons]]\nname='a'\nkey_env='KEY'"])
def test_key_of_a_node_that_no_header_can_carry_is_an_error_at_the_start(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(text.replace("key_env='KEY'", "endpoint='http://a:1'\nkey_env='KEY'"))
    load(path, {"KEY": " nk-one\r\n"})
    with pytest.raises(SettingsError, match="the environment variable KEY holds more than one key") as caught:
        load(path, {"KEY": key})
    assert "nk" not in str(caught.value), "a message shows no key"


def test_catalogue_of_another_name_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text("[gateway]\nmodels = 'mdoels.toml'\n")
    with pytest.raises(SettingsError, match=r"no config file at .*mdoels\.toml"):
        ConfigurationFiles(path, {}).read()
    path.write_text("[gateway]\nmodels = 'models.toml'\n")
    assert ConfigurationFiles(path, {}).read()[1].models == ()


NODE = '[[neurons]]\nname = "beast"\nendpoint = "http://a:1"\n'


@pytest.mark.parametrize(
    ("catalogue", "place", "advice"),
    [
        ('[[models]]\nid = "a"\n[[models]]\nid = "b"\npinned_on = ["baest"]\n', "line 5", "did you mean `beast`?"),
        ('[[models]]\nid = "a"\nonly_on = ["attic"]\n', "line 3", "the nodes are beast"),
        ('[[models]]\nid = "a"\nharness = "vllm"\nnodes = ["beast", "bast"]\n', "line 4", "did you mean `beast`?"),
        ('[aliases]\ndefault = "coder"\ncoder = "a"\n', "line 2", "name the model"),
    ],
)
def test_name_that_stands_for_nothing_is_an_error_with_its_place(
    tmp_path: Path, catalogue: str, place: str, advice: str
) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(NODE)
    (tmp_path / "models.toml").write_text(catalogue)
    with pytest.raises(SettingsError, match=f"models.toml {place}: .*{re.escape(advice)}"):
        ConfigurationFiles(path, {}).read()


def test_names_of_nodes_that_dns_will_find_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text('[discovery]\ndns = "neurons.local"\n')
    (tmp_path / "models.toml").write_text('[[models]]\nid = "a"\npinned_on = ["10.0.0.1"]\n')
    assert ConfigurationFiles(path, {}).read()[1].models[0].pinned_on == ("10.0.0.1",)


@pytest.mark.parametrize(
    "created",
    [
        Catalogue(models=(ModelSpec(id="mine", only_on=("attic",)),)),
        Catalogue(aliases={"mine": "yours", "yours": "gone"}),
        Catalogue(aliases={"coder": "gone"}),
    ],
)
def test_a_created_model_that_stands_for_nothing_prevents_no_start_and_no_reload(
    tmp_path: Path, created: Catalogue
) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(NODE)
    (tmp_path / "models.toml").write_text('[aliases]\ndefault = "coder"\n')
    files = ConfigurationFiles(path, {})
    config, _ = files.read()
    CreatedModels(config.state_directory(tmp_path)).write(created)

    config, catalogue = files.read()
    files.check_aliases(config, catalogue, ["coder"])

    assert {*created.ids, *created.aliases} <= {*catalogue.ids, *catalogue.aliases}
