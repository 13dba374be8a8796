"""What the objects mean to one another and to the program: selectors, ports, volumes, commands, times, security."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from chart_values import DIGEST, PLAIN
from chart_world import RELEASE, RESTRICTED, Object, Pod, Rendering, env_of, matches, template, walk, write_values
from loraplex.cli.app import build_app
from loraplex_registry.wire.setting import SETTINGS

LAST_EVENTS_S = 5
"""What gateway and engine take after the drain (`_LAST_EVENTS_S`)."""
SECRET = re.compile(
    r"BEGIN [A-Z ]*PRIVATE KEY|postgresql(\+psycopg)?://|rediss?://[^.]*@|lpx_[A-Za-z0-9]{10}_|AKIA[0-9A-Z]{16}"
)


def test_names_are_unique(rendering: Rendering) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in rendering.objects]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)


def test_every_selector_means_pods_that_there_are(rendering: Rendering) -> None:
    for one in rendering.of_kind("Deployment", "StatefulSet"):
        assert matches(one["spec"]["selector"], Pod(one).labels)
        found = [pod for pod in rendering.pods if matches(one["spec"]["selector"], pod.labels)]
        assert [pod.owner for pod in found] == [one], "it takes another one's pods"
    for one in rendering.of_kind("Service"):
        owners = [
            pod.owner["kind"] for pod in rendering.pods if matches({"matchLabels": one["spec"]["selector"]}, pod.labels)
        ]
        assert owners in (["Deployment"], ["StatefulSet"])
    for one in rendering.of_kind("PodDisruptionBudget"):
        found = [pod for pod in rendering.pods if matches(one["spec"]["selector"], pod.labels)]
        assert len(found) == 1
    services = rendering.of_kind("Service")
    for one in rendering.of_kind("ServiceMonitor"):
        chosen = [service for service in services if matches(one["spec"]["selector"], service["metadata"]["labels"])]
        assert chosen, one["metadata"]["name"]
        for endpoint in one["spec"]["endpoints"]:
            assert all(endpoint["port"] in {port["name"] for port in service["spec"]["ports"]} for service in chosen)


def test_each_workload_has_a_budget_and_is_spread(render: Callable[[str], Rendering]) -> None:
    rendering = render("production")
    workloads = rendering.of_kind("Deployment", "StatefulSet")
    assert len(workloads) == 3
    for one in workloads:
        pod = Pod(one)
        assert [
            budget
            for budget in rendering.of_kind("PodDisruptionBudget")
            if matches(budget["spec"]["selector"], pod.labels)
        ]
        constraints = pod.spec["topologySpreadConstraints"]
        assert {rule["topologyKey"] for rule in constraints} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }
        assert all(matches(rule["labelSelector"], pod.labels) for rule in constraints)


def test_a_service_s_port_is_the_container_s(rendering: Rendering) -> None:
    for one in rendering.of_kind("Service"):
        (pod,) = [pod for pod in rendering.pods if matches({"matchLabels": one["spec"]["selector"]}, pod.labels)]
        ports = {port["name"]: port["containerPort"] for port in pod.main["ports"]}
        listen = env_of(pod.main)["LORAPLEX_LISTEN"]
        for port in one["spec"]["ports"]:
            assert listen.rpartition(":")[2] == str(ports[port["targetPort"]])
            if one["spec"].get("clusterIP") == "None":
                # clients of a headless service reach the container itself
                assert port["port"] == ports[port["targetPort"]]


def test_addresses_in_settings_are_services_of_the_release(rendering: Rendering) -> None:
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]} for one in rendering.of_kind("Service")
    }
    found = 0
    for pod in rendering.pods:
        for container in pod.containers:
            for name, port in re.findall(
                r"http://([a-z0-9-]+)\.prod\.svc\.cluster\.local:(\d+)", json.dumps(container)
            ):
                assert int(port) in services[name]
                found += 1
    assert found or rendering.name.startswith("trial")


def test_routes_lead_to_the_gateway(rendering: Rendering) -> None:
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0] for one in rendering.of_kind("Service")}
    door = f"{RELEASE}-loraplex-{'trial' if rendering.name.startswith('trial') else 'gateway'}"
    for one in rendering.of_kind("Ingress"):
        (backend,) = [path["backend"]["service"] for rule in one["spec"]["rules"] for path in rule["http"]["paths"]]
        assert (backend["name"], backend["port"]["name"]) == (door, ports[door]["name"])
        notes = one["metadata"]["annotations"]
        prefix = "nginx.ingress.kubernetes.io/proxy"
        assert notes[f"{prefix}-buffering"] == notes[f"{prefix}-request-buffering"] == "off"
        # the longest request that the API takes, and the largest body
        assert int(notes[f"{prefix}-read-timeout"]) >= 3600
        assert int(notes[f"{prefix}-body-size"].removesuffix("m")) > 512
    for one in rendering.of_kind("HTTPRoute"):
        (rule,) = one["spec"]["rules"]
        assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}
        assert [(to["name"], to["port"]) for to in rule["backendRefs"]] == [(door, ports[door]["port"])]


def test_every_pod_is_restricted(rendering: Rendering) -> None:
    """What the Pod Security Standard `restricted` asks for, and more."""
    assert rendering.pods
    for pod in rendering.pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert not pod.spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        security = pod.spec["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        ids = {security.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")}
        assert ids == ({None} if rendering.name == "plain" else {10001})
        for container in pod.containers:
            assert container["securityContext"] == RESTRICTED
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        kinds = {kind for volume in pod.spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "projected", "persistentVolumeClaim", "configMap"}
    for one in rendering.of_kind("ServiceAccount"):
        assert one["automountServiceAccountToken"] is False
    assert not rendering.of_kind("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Secret")


def test_what_is_mounted_is_there_and_what_is_written_is_a_volume(rendering: Rendering) -> None:
    for pod in rendering.pods:
        for container in pod.containers:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= pod.volumes
            assert "/tmp" in mounts
            env = env_of(container)
            for name in ("LORAPLEX_DATA_DIR", "LORAPLEX_CACHE_DIR", "HF_HOME", "HOME", "TMPDIR"):
                if name in env:
                    assert any(f"{env[name]}/".startswith(f"{place}/") for place in mounts), f"{name} is read-only"
            for name, value in env.items():
                if name.startswith("LORAPLEX_") and name.endswith("_FILE"):
                    assert value.rpartition("/")[2] in _projected(pod, mounts[value.rpartition("/")[0]])
        for volume in pod.spec["volumes"]:
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], "a folder without an end fills the node"


def _projected(pod: Pod, name: str) -> set[str]:
    (volume,) = [one for one in pod.spec["volumes"] if one["name"] == name]
    assert volume["projected"]["defaultMode"] == 0o440
    return {item["path"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}


def test_each_part_holds_only_its_own_secrets(render: Callable[[str], Rendering]) -> None:
    held = {
        pod.component: {item["key"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
        for pod in render("production").pods
        for volume in pod.spec["volumes"]
        if "projected" in volume
    }
    assert held == {
        "gateway": {"database-url", "redis-url", "admin-key", "key-pepper", "signing-key", "engine-key"},
        "registry": {"database-url", "verify-keys", "engine-key"},
        "engine": {"verify-keys", "engine-key"},
        "migration": {"database-url"},
        "registration": {"admin-key"},
        "test": {"admin-key"},
    }


def test_nothing_that_is_rendered_is_a_secret(rendering: Rendering) -> None:
    for one in rendering.objects:
        for path, value in walk(one):
            assert not SECRET.search(str(value)), f"{one['kind']} {'.'.join(path)}"
    secrets = {one.name for one in SETTINGS if one.is_secret}
    for pod in rendering.pods:
        for container in pod.containers:
            for variable in container.get("env", []):
                name = variable["name"]
                if name in secrets or re.search(r"(_KEY|_KEY_ID|TOKEN|PASSWORD)$", name):
                    assert "secretKeyRef" in variable["valueFrom"], name


def test_every_command_is_one_that_the_program_takes(rendering: Rendering) -> None:
    app = build_app()
    for pod in rendering.pods:
        for container in pod.containers:
            if "command" in container:
                python, flag, module = container["command"]
                assert (python, flag, container.get("args")) == ("python", "-m", None)
                assert importlib.util.find_spec(f"{module}.__main__")
            else:
                command, _, _ = app.parse_args([*container["args"]], exit_on_error=False, print_error=False)
                assert callable(command)


def test_images_are_those_of_the_release_or_a_digest(render: Callable[[str], Rendering]) -> None:
    rendering = render("everything")
    images = {pod.component: {container["image"] for container in pod.containers} for pod in rendering.pods}
    control = {"registry.test/x/loraplex-control-plane:0.1.0"}
    engine = {f"registry.test/x/loraplex-engine@{DIGEST}"}
    assert images["gateway"] == images["registry"] == images["migration"] == images["test"] == control
    assert images["engine"] == images["registration"] == engine
    assert all(pod.spec["imagePullSecrets"] == [{"name": "pull"}] for pod in rendering.pods)


def test_a_pod_outlives_its_drain(rendering: Rendering) -> None:
    for pod in rendering.pods_of("gateway") + rendering.pods_of("engine") + rendering.pods_of("trial"):
        drain = float(env_of(pod.main)["LORAPLEX_DRAIN_S"])
        hook = pod.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        assert pod.spec["terminationGracePeriodSeconds"] > float(hook[1]) + drain + LAST_EVENTS_S
    for pod in rendering.pods_of("gateway") + rendering.pods_of("registry"):
        # a balancer takes the pod out before it stops to listen
        assert int(pod.main["lifecycle"]["preStop"]["exec"]["command"][1]) >= 5


def test_a_gateway_alone_never_meets_another_one(render: Callable[[str], Rendering]) -> None:
    assert render("plain").get("Deployment", "gateway")["spec"]["strategy"] == {"type": "Recreate"}
    strategy = render("production").get("Deployment", "gateway")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_engines_are_placed_and_kept_as_their_pool_says(render: Callable[[str], Rendering]) -> None:
    rendering = render("everything")
    assert {one["metadata"]["labels"]["loraplex.io/pool"] for one in rendering.of_kind("StatefulSet")} == {
        "main",
        "small",
        "full",
    }
    (main,), (small,), (full,) = (rendering.pods_of("engine", pool) for pool in ("main", "small", "full"))
    assert main.main["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert main.spec["nodeSelector"] == {"disk": "fast", "nvidia.com/gpu.present": "true"}
    assert [one["key"] for one in main.spec["tolerations"]] == ["nvidia.com/gpu"]
    assert main.spec["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in json.dumps(small.spec)
    assert "replicas" not in main.owner["spec"], "KEDA's number would be overwritten by each upgrade"
    assert small.owner["spec"]["replicas"] == 3
    assert env_of(small.main)["LORAPLEX_ENGINE_MAX_LORAS"] == "4"
    assert env_of(small.main)["LORAPLEX_ENGINE_MAX_MODEL_LEN"] == "2048"
    (claim,) = main.owner["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert {one["name"]: one for one in full.spec["volumes"]}["cache"]["persistentVolumeClaim"] == {
        "claimName": "weights"
    }


def test_weights_are_fetched_before_an_engine_starts(render: Callable[[str], Rendering]) -> None:
    rendering = render("everything")
    (main,), (full,) = rendering.pods_of("engine", "main"), rendering.pods_of("engine", "full")
    (weights,) = main.spec["initContainers"]
    assert weights["args"] == ["base", "pull", "meta-llama/Llama-3.2-1B", "--served-model-name", "llama"]
    cache = {mount["mountPath"] for mount in weights["volumeMounts"] if mount["name"] == "cache"}
    assert cache == {mount["mountPath"] for mount in main.main["volumeMounts"] if mount["name"] == "cache"}
    assert env_of(weights)["LORAPLEX_CACHE_DIR"] == env_of(main.main)["LORAPLEX_CACHE_DIR"] in cache
    assert env_of(main.main)["LORAPLEX_ENGINE_BASE"] == "llama"
    assert "initContainers" not in full.spec
    probe = main.main["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_jobs_come_before_or_beside(render: Callable[[str], Rendering]) -> None:
    hook = render("production").get("Job", "migration")
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade,pre-rollback"
    policy = render("production").get("NetworkPolicy", "migration")["metadata"]["annotations"]
    assert int(policy["helm.sh/hook-weight"]) < int(hook["metadata"]["annotations"]["helm.sh/hook-weight"])
    (beside,) = [one for one in render("plain").of_kind("Job") if "migration" in one["metadata"]["name"]]
    assert "annotations" not in beside["metadata"]
    # a job cannot be changed, so another pod is another job
    assert re.fullmatch(r"rel-loraplex-migration-[0-9a-f]{8}", beside["metadata"]["name"])
    bases = {pod.labels["loraplex.io/pool"]: pod.main["args"] for pod in render("everything").pods_of("registration")}
    assert set(bases) == {"main", "small", "elsewhere"}, "a full fine-tune is registered by its escalation"
    assert bases["main"][2:] == ["meta-llama/Llama-3.2-1B", "--served-model-name", "llama", "--max-lora-rank", "128"]


@pytest.mark.parametrize(
    "change",
    [{"image": {"controlPlane": {"tag": "2"}, "engine": {"tag": "2"}}}, {"commonLabels": {"team": "x"}}],
    ids=["image", "labels"],
)
def test_a_job_that_would_differ_has_another_name(helm: Path, tmp_path: Path, change: Object) -> None:
    values = {**PLAIN, "registration": {"enabled": True}}
    named = {}
    for key, more in (("before", {}), ("after", change)):
        (tmp_path / key).mkdir()
        objects = template(helm, write_values(tmp_path / key, {**values, **more}))
        named[key] = {one["metadata"]["name"] for one in objects if one["kind"] == "Job"}
    assert len(named["before"]) == 2
    assert not named["before"] & named["after"]


@pytest.mark.parametrize("name", ["gateway", "registry"])
def test_a_new_version_of_the_chart_restarts_nothing_by_itself(render: Callable[[str], Rendering], name: str) -> None:
    labels: Object = Pod(render("production").get("Deployment", name)).labels
    assert not labels.keys() & {"helm.sh/chart", "app.kubernetes.io/version"}
