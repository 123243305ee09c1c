//! Configuration files of a node's programs.

use super::network::Plan;
use serde_json::json;

/// Service address of the cluster DNS.
pub(super) const DNS: &str = "10.96.0.10";
/// Domain of Service names.
pub(super) const DOMAIN: &str = "cluster.local";
/// CNI plugins, where Debian installs them.
pub(super) const CNI: &str = "/usr/lib/cni";

/// Returns containerd's configuration: everything is in two folders that are private to the node.
pub(super) fn containerd(sandbox: &str) -> String {
    // `restrict_oom_score_adj`: without CAP_SYS_RESOURCE to lower the score, no container would
    // start.
    format!(
        "version = 3\nroot = '/var/lib/containerd'\nstate = '/run/containerd'\n\
         [grpc]\naddress = '/run/containerd/containerd.sock'\n\
         [plugins.'io.containerd.cri.v1.runtime']\nrestrict_oom_score_adj = true\nenable_cdi = true\ncdi_spec_dirs = ['/run/cdi']\n\
         [plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['{CNI}']\nconf_dir = '/run/cni'\n\
         [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = '{sandbox}'\n"
    )
}

/// Returns the CNI configuration of the node's pods. Each pod has a point-to-point link to the
/// node, which routes. On a shared bridge, a reply from a Service's pod would bypass the node's NAT
/// and arrive from an address the client did not call.
pub(super) fn pod_network(plan: Plan, index: u8) -> String {
    json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [
        {
            "type": "ptp", "ipMasq": false,
            "ipam": {"type": "host-local", "dataDir": "/run/cni/addresses", "ranges": [[{"subnet": plan.pods(index)}]],
                "routes": [{"dst": "0.0.0.0/0"}]},
        },
        {"type": "portmap", "capabilities": {"portMappings": true}},
    ]})
    .to_string()
}

/// Returns the kubelet's configuration, with its containers in cgroups below `group`.
pub(super) fn kubelet(group: &str) -> String {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": {"clientCAFile": "/var/lib/kubelet/ca.crt"}},
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{group}"), "enforceNodeAllocatable": [], "failCgroupV1": false,
        "failSwapOn": false, "oomScoreAdj": 0,
        "clusterDNS": [DNS], "clusterDomain": DOMAIN, "resolvConf": "",
        "nodeStatusUpdateFrequency": "2s",
        // Developer disks are usually nearly full, and deleted images cannot be pulled again.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    })
    .to_string()
}

/// Returns kube-proxy's configuration. Connection limits are global to the machine, so they are
/// disabled.
pub(super) fn kube_proxy(plan: Plan, node: &str) -> String {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": "/var/lib/kube-proxy/kubeconfig"},
        "mode": "iptables", "clusterCIDR": plan.all(), "hostnameOverride": node,
        "conntrack": {"maxPerCore": 0, "min": 0},
    })
    .to_string()
}

/// Returns the configuration of CoreDNS on this machine. It resolves only Service and pod names.
pub(super) fn coredns(plan: Plan, port: u16, kubeconfig: &std::path::Path) -> String {
    format!(
        "{DOMAIN}:{port} in-addr.arpa:{port} {{\n  bind {}\n  errors\n  kubernetes {DOMAIN} in-addr.arpa {{\n    kubeconfig {}\n  }}\n}}\n",
        plan.host(),
        kubeconfig.display()
    )
}
