"""Sets of values for the chart, each for a way to run it; `ALL_SETTINGS` is as full as the schema allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chart_world import CHART

Values = dict[str, Any]
SCHEMA: Values = json.loads((CHART / "values.schema.json").read_text())
OBJECT_STORE = {"url": "s3://bucket/adapters?region=eu-1"}
BASE = {"name": "smollm2-135m"}
POOL = {"base": BASE}
DIGEST = "sha256:" + "a" * 64
GATEWAY_SETTINGS: Values = {
    "parityGate": "when_available",
    "purgeAfterDays": 7,
    "outcomeDays": 8,
    "databasePoolSize": 9,
    "logLevel": "debug",
    "logFormat": "text",
}
PROXIES = ["10.8.0.0/16", "fd00:8::/32", "192.0.2.7"]
ENGINE_SETTINGS: Values = {
    "maxModelLen": 2048,
    "maxNumSeqs": 32,
    "maxQueuedRequests": 1_000_000,
    "maxNumBatchedTokens": 4096,
    "kvCacheMemoryBytes": "2GiB",
    "blockSize": 32,
    "dtype": "float32",
    "kvCacheDtype": "auto",
    "quantization": "none",
    "enablePrefixCaching": False,
    "enableChunkedPrefill": True,
    "tensorParallelSize": 1,
    "maxLoras": 12,
    "maxCpuLoras": 40,
    "maxLoraRank": 128,
    "adapterCacheBytes": 21_474_836_480,
    "device": "cpu",
    "attentionBackend": "auto",
    "enforceEager": True,
    "seed": 0,
    "adapterLoadTimeout": 30.5,
    "stepTimeout": 45,
    "cpuThreads": 3,
    "toolCallParser": "hermes",
    "native": False,
    "logLevel": "warning",
    "logFormat": "json",
}
MONITORING = {
    "serviceMonitor": {
        "enabled": True,
        **{name: {"name": "metrics"} for name in ("gatewayKey", "engineToken", "registryToken")},
    },
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}
EVERYTHING: Values = {
    "image": {"registry": "registry.test/x", "pullSecrets": ["pull"], "engine": {"digest": DIGEST}},
    "objectStore": {**OBJECT_STORE, "publicUrl": "https://objects.test", "credentials": {"name": "bucket"}},
    "commonLabels": {"team": "platform"},
    "commonAnnotations": {"owner": "platform"},
    "gateway": {
        "config": GATEWAY_SETTINGS,
        "trustedProxies": PROXIES,
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "extraEnv": [{"name": "AWS_REGION", "value": "eu-1"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}},
    },
    "registry": {"config": {"databasePoolSize": 3, "logLevel": "error", "logFormat": "text"}},
    "engine": {
        "config": ENGINE_SETTINGS,
        "weights": {"hubEndpoint": "https://hub.test", "hubToken": {"name": "hub"}},
        "prometheus": {"address": "http://prometheus:9090", "authentication": {"name": "auth"}},
        "pools": {
            "main": {
                "base": {"name": "llama", "source": "meta-llama/Llama-3.2-1B"},
                "pin": ["team-x", {"model": "team-y/support@canary", "copies": 2}],
                "gpu": {"count": 1, "runtimeClassName": "nvidia"},
                "nodeSelector": {"disk": "fast"},
                "autoscaling": {"enabled": True, "minReplicas": 2},
            },
            "small": {"base": BASE, "replicas": 3, "config": {"maxLoras": 4}, "cache": {"kind": "emptyDir"}},
            "full": {
                "model": {"name": "team-x-full-v1", "source": "/models/team-x-full"},
                "cache": {"kind": "existingClaim", "existingClaim": "weights"},
                "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
                "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
                "autoscaling": {"enabled": True},
                "prefetch": {"enabled": False},
            },
            "elsewhere": {"base": {"name": "qwen"}, "engines": ["http://10.9.0.1:8100", "dns+http://engines:8100"]},
        },
    },
    "ingress": {"enabled": True, "hosts": ["llm.test"], "tls": [{"hosts": ["llm.test"], "secretName": "tls"}]},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "edge", "namespace": "edge"}], "hostnames": ["llm.test"]},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}}]},
    "monitoring": MONITORING,
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {"a": "b"}}
    ],
}
PLAIN: Values = {
    # no registry of its own, one gateway without Redis, the Secret made by the same release
    "objectStore": OBJECT_STORE,
    "redis": {"enabled": False},
    "gateway": {"replicas": 1, "serviceAccount": {"create": False}},
    "registry": {"enabled": False},
    "migration": {"hook": False},
    "registration": {"enabled": False},
    "security": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
    "engine": {"pools": {"main": POOL}},
    "listenHost": "[::]",
    "fullnameOverride": "rel-loraplex",
}
OPEN: Values = {
    "objectStore": OBJECT_STORE,
    "networkPolicy": {"enabled": False},
    "engine": {"pools": {"main": POOL}},
    "gateway": {"podDisruptionBudget": {"enabled": False}, "topologySpread": []},
}
TRIAL_SETTINGS: Values = {
    "trial": {"enabled": True, "adminKey": {"name": "admin"}, "existingClaim": "mine"},
    "gateway": {"config": GATEWAY_SETTINGS, "trustedProxies": PROXIES},
    "engine": {"config": ENGINE_SETTINGS},
    "ingress": {"enabled": True, "hosts": ["llm.test"]},
}
CASES: dict[str, Path | Values] = {
    "trial": CHART / "values-trial.yaml",
    "production": CHART / "values-production.yaml",
    "everything": EVERYTHING,
    "plain": PLAIN,
    "open": OPEN,
    "trial-settings": TRIAL_SETTINGS,
}
