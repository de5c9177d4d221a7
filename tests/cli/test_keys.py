"""`poolgrid keys`: what it writes a router takes, and what a router would refuse it names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.cli.main import app
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.tenants import Tenants


def keys(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], input=typed)


def test_a_key_that_was_made_opens_the_door_of_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = keys("create", str(path), "acme", "--name", "ci", "--requests-per-minute", "60", "--model", "a")
    second = keys("create", str(path), "acme", "--expires", "2999-01-01", "--operator")
    assert (made.exit_code, second.exit_code) == (0, 0), made.output + second.output

    document = key_file.read(path)
    tenants = Tenants(document)
    for result in (made, second):
        key = result.stdout.split()[0]
        account = tenants.authenticate(key.encode(), 0.0)
        assert account.name == "acme"
        assert key not in path.read_text()
        hashed = keys("hash", typed=f"{key}\n").stdout.strip()
        assert hashed in [each.hash for each in document.tenants["acme"].keys]
    tenant = document.tenants["acme"]
    assert (tenant.requests_per_minute, tenant.models, tenant.operator) == (60, ("a",), True)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_list_shows_limits_and_short_names_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys("create", str(path), "acme", "--tokens-per-minute", "1000", "--expires", "2001-01-01")

    shown = keys("list", str(path)).stdout
    document = key_file.read(path)
    assert "acme tokens_per_minute=1000" in shown
    assert f"{document.tenants['acme'].keys[0].id} expired 2001-01-01T00:00:00+00:00" in shown
    assert document.salt_secret not in shown


def test_a_key_that_was_revoked_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = [keys("create", str(path), "acme").stdout.split()[0] for _ in range(2)]
    first = key_file.read(path).tenants["acme"].keys[0].id

    assert keys("revoke", str(path), first).exit_code == 0
    assert keys("revoke", str(path), first).exit_code == 1
    tenants = Tenants(key_file.read(path))
    assert tenants.authenticate(made[1].encode(), 0.0).name == "acme"
    with pytest.raises(Refused, match="not known"):
        tenants.authenticate(made[0].encode(), 0.0)


def test_check_names_every_problem_and_create_leaves_a_broken_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"version": 1, "salt_secret": "x", "tenants": {"a b": {}}}')

    checked = keys("check", str(path))
    assert checked.exit_code == 1
    assert "salt_secret" in checked.output
    assert "a b" in checked.output
    before = path.read_bytes()
    assert keys("create", str(path), "acme").exit_code == 1
    assert path.read_bytes() == before
    assert keys("create", str(tmp_path / "new.json"), "no name").exit_code == 1
    assert not (tmp_path / "new.json").exists()
    assert keys("check", str(tmp_path / "none.json")).exit_code == 1
    assert keys("hash", typed="\n").exit_code == 1


def test_what_was_made_is_told_as_json_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    made = json.loads(keys("create", str(path), "acme", "--json").stdout)
    (key,) = key_file.read(path).tenants["acme"].keys
    assert (made["id"], made["tenant"], made["file"]) == (key.id, "acme", str(path))
    assert keys("hash", typed=made["key"]).stdout.strip() == key.hash
    pair = json.loads(keys("curve", str(tmp_path), "--name", "plane", "--json").stdout)
    assert pair == {"secret": str(tmp_path / "plane.key_secret"), "public": str(tmp_path / "plane.key")}
    assert all(Path(file).is_file() for file in pair.values())


def test_list_and_check_print_json_and_check_takes_several_files(tmp_path: Path) -> None:
    path, broken = tmp_path / "keys.json", tmp_path / "broken.json"
    keys("create", str(path), "acme", "--name", "ci", "--expires", "2001-01-01")
    broken.write_text("{}")

    listed = json.loads(keys("list", str(path), "--json").stdout)
    assert [(key["name"], key["expired"]) for key in listed["acme"]["keys"]] == [("ci", True)]
    assert key_file.read(path).tenants["acme"].keys[0].hash not in keys("list", str(path), "--json").stdout
    assert keys("check", str(path)).stdout == f"{path}: 1 tenant with 1 key\n"
    both = keys("check", str(path), str(broken), "--json")
    assert both.exit_code == 1
    found = json.loads(both.stdout)
    assert found[str(path)] == {"tenants": 1, "keys": 1, "problems": []}
    assert found[str(broken)]["problems"]
