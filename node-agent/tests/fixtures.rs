//! Descriptions of synthetic machines, built as directory trees.

mod fixture;

use fixture::{roots, server};
use jiff::Timestamp;
use std::path::PathBuf;
use switchyard_crds::gpu_topology::{CacheKind, FactSource, Facts, GPUTopologyStatus, Nic, NicKind, SourceState};
use switchyard_node_agent::{DescribeError, Roots, describe};
use switchyard_scenes::Tree;

fn status(roots: &Roots) -> GPUTopologyStatus {
    let topology = describe(roots, Timestamp::UNIX_EPOCH).expect("a description");
    assert_eq!(topology.metadata.name.as_deref(), Some(roots.node_name.as_str()));
    topology.status.expect("a description has a status")
}

fn source(status: &GPUTopologyStatus, facts: Facts) -> &FactSource {
    status.source(facts).unwrap_or_else(|| panic!("no source of {facts:?}"))
}

fn nic<'a>(status: &'a GPUTopologyStatus, name: &str) -> &'a Nic {
    status.nics.iter().find(|nic| nic.name == name).unwrap_or_else(|| panic!("no NIC {name}: {:?}", status.nics))
}

#[test]
fn two_sockets_with_two_threads_per_core() {
    let status = status(&roots(&server()));
    let cpus = status.cpus.as_ref().expect("CPUs");
    assert_eq!((cpus.sockets, cpus.cores, cpus.threads), (Some(2), Some(4), Some(8)));
    assert_eq!(cpus.siblings, ["0,4", "1,5", "2,6", "3,7"]);
    assert_eq!(cpus.model.as_deref(), Some("Xeon 8480+"));
    assert_eq!(cpus.architecture.as_deref(), Some("x86_64"));
    // CPUs 8 to 11 are allowed but do not exist.
    assert_eq!(cpus.usable.as_deref(), Some("0-3"));
    assert_eq!(cpus.quota_millicores, Some(3500), "the limit of the group above counts too");
    let caches: Vec<_> =
        cpus.caches.iter().map(|cache| (cache.level, cache.kind, cache.size_bytes, cache.shared_by.len())).collect();
    assert_eq!(
        caches,
        [
            (1, CacheKind::Data, Some(48 << 10), 4),
            (1, CacheKind::Instruction, Some(32 << 10), 4),
            (2, CacheKind::Unified, Some(2 << 20), 4),
            (3, CacheKind::Unified, Some(105 << 20), 2),
        ]
    );
    assert_eq!(cpus.caches[3].shared_by, ["0-1,4-5", "2-3,6-7"]);
    assert_eq!(source(&status, Facts::CPUs).state, SourceState::Complete);

    assert_eq!(status.numa_node_count, Some(2));
    assert_eq!(status.numa_nodes[1].cpus.as_deref(), Some("2-3,6-7"));
    assert_eq!(status.numa_nodes[1].memory_bytes, Some(2 << 20));
    assert_eq!(status.numa_nodes[1].distances, [21, 10]);
    assert_eq!(status.memory_bytes, Some(3 << 20));

    let host = status.host.as_ref().expect("host");
    assert_eq!(host.default_route.as_deref(), Some("bond0"));
    assert_eq!(host.locked_memory_limit.as_deref(), Some("Unlimited"));
    assert_eq!(status.host_identity.as_ref().and_then(|identity| identity.hostname.as_deref()), Some("gpu-07"));
}

#[test]
fn network_devices() {
    let status = status(&roots(&server()));
    let names: Vec<&str> = status.nics.iter().map(|nic| nic.name.as_str()).collect();
    // `lo` and `docker0` are virtual and carry no default route.
    assert_eq!(names, ["bond0", "eth0", "mlx5_1", "rocep26"]);
    assert_eq!(status.nic_count, Some(4));

    let roce = nic(&status, "rocep26");
    assert_eq!(roce.pcie_path, ["pci0000:17", "0000:17:01.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"]);
    assert_eq!(roce.bus_id.as_deref(), Some("0000:1a:00.0"));
    assert_eq!((roce.rdma_device.as_deref(), roce.port), (Some("mlx5_0"), Some(1)));
    assert_eq!((roce.rate_megabits_per_second, roce.state.as_deref()), (Some(400_000), Some("Active")));
    assert_eq!((roce.numa_node, roce.kind), (Some(0), NicKind::Physical));

    let down = nic(&status, "mlx5_1");
    assert_eq!((down.rate_megabits_per_second, down.state.as_deref()), (None, Some("Down")));
    assert_eq!((down.link_layer.as_deref(), down.numa_node), (Some("InfiniBand"), Some(1)));

    let lan = nic(&status, "eth0");
    assert_eq!(lan.bus_id.as_deref(), Some("0000:00:03.0"), "the PCI function above the virtio device");
    assert_eq!((lan.rate_megabits_per_second, lan.numa_node), (None, None), "-1 is unknown, not a number");

    let bond = nic(&status, "bond0");
    assert_eq!((bond.kind, bond.rate_megabits_per_second), (NicKind::Virtual, Some(25_000)));
}

#[test]
fn a_missing_gpu_differs_from_a_missing_driver() {
    let tree = server();
    let without = status(&roots(&tree));
    assert_eq!(without.gpu_count, Some(0));
    assert_eq!(source(&without, Facts::GPUs).message.as_deref(), Some("no NVIDIA GPU on the PCI bus"));
    assert_eq!(source(&without, Facts::GPUs).state, SourceState::Complete);

    tree.pci("pci0000:17/0000:17:05.0/0000:1b:00.0", "0x10de", "0x030200", "0");
    // A switch of the same vendor is not a GPU.
    tree.pci("pci0000:17/0000:17:06.0/0000:1c:00.0", "0x10de", "0x068000", "0");
    let without_driver = status(&roots(&tree));
    assert_eq!(without_driver.gpu_count, None);
    let source = source(&without_driver, Facts::GPUs);
    assert_eq!(source.state, SourceState::Unavailable);
    let message = source.message.as_deref().expect("a reason");
    assert!(message.starts_with("1 NVIDIA GPUs on the PCI bus, but NVML does not work"), "{message}");
    assert!(message.contains("no-such-library.so"), "{message}");
}

#[test]
fn container_without_numa_nodes() {
    let tree = server();
    std::fs::remove_dir_all(tree.path("sys/devices/system/node")).expect("it was there");
    let status = status(&roots(&tree));
    assert!(status.numa_nodes.is_empty());
    assert_eq!(status.numa_node_count, None);
    assert_eq!(status.memory_bytes, Some(3 << 20), "memory comes from elsewhere");
    assert_eq!(source(&status, Facts::NUMANodes).state, SourceState::Unavailable);
    assert_eq!(source(&status, Facts::CPUs).state, SourceState::Complete);
}

#[test]
fn a_broken_value_affects_only_itself() {
    let tree = server();
    tree.file("sys/devices/system/node/node1/cpulist", "2-x");
    tree.file("sys/devices/system/node/node0/distance", "10 21 31");
    tree.file("sys/devices/system/cpu/cpu3/topology/physical_package_id", "-1");
    tree.file("sys/devices/system/cpu/cpu2/cache/index2/type", "Strange");
    tree.file("sys/class/net/rocep26/speed", "fast");
    tree.file("sys/class/infiniband/mlx5_0/ports/1/rate", "?");
    tree.file("proc/meminfo", "nothing");
    let status = status(&roots(&tree));

    assert_eq!((status.numa_nodes[1].cpus.as_deref(), status.numa_nodes[1].memory_bytes), (None, Some(2 << 20)));
    assert!(status.numa_nodes[0].distances.is_empty());
    assert_eq!(status.numa_nodes[1].distances, [21, 10]);
    assert_eq!(status.memory_bytes, None);
    let message = source(&status, Facts::NUMANodes).message.as_deref().expect("notes");
    assert!(message.contains("`2-x`") || message.contains("`x`"), "{message}");
    assert!(message.contains("3 distances for 2 nodes"), "{message}");

    let cpus = status.cpus.as_ref().expect("CPUs");
    assert_eq!((cpus.sockets, cpus.cores), (None, Some(4)));
    let message = source(&status, Facts::CPUs).message.as_deref().expect("notes");
    assert!(
        message.contains("socket of CPU 3,7 unknown") && message.contains("caches of CPU 2,6 unknown"),
        "{message}"
    );

    assert_eq!(nic(&status, "rocep26").rate_megabits_per_second, None);
}

#[test]
fn empty_trees_describe_nothing_and_do_not_fail() {
    let status = status(&roots(&Tree::new()));
    assert_eq!((status.cpus.as_ref(), status.nic_count, status.gpu_count), (None, None, None));
    for source in &status.sources {
        assert_eq!(source.state, SourceState::Unavailable, "{source:?}");
        assert!(source.message.is_some(), "{source:?}");
    }
}

#[test]
fn quota_of_version_1() {
    let tree = server();
    tree.file("proc/self/cgroup", "4:cpu,cpuacct:/docker/ab\n1:name=systemd:/");
    // Inside the container the mount shows the container's own group as its root.
    tree.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000");
    tree.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
    let quota = || status(&roots(&tree)).cpus.and_then(|cpus| cpus.quota_millicores);
    assert_eq!(quota(), Some(500));
    tree.file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
    assert_eq!(quota(), None);
}

#[test]
fn errors_name_what_was_expected() {
    let tree = Tree::new();
    let error = describe(&Roots { node_name: "Not A Name".to_owned(), ..roots(&tree) }, Timestamp::UNIX_EPOCH);
    assert!(matches!(error, Err(DescribeError::NodeName { .. })));
    let error = describe(&Roots { sysfs: PathBuf::from("/no/such"), ..roots(&tree) }, Timestamp::UNIX_EPOCH);
    assert_eq!(error.expect_err("no sysfs").to_string(), "sysfs root /no/such: expected a directory");
}

#[test]
fn describes_the_machine_it_runs_on() {
    let start = std::time::Instant::now();
    let topology = describe(&Roots::local("here"), Timestamp::UNIX_EPOCH).expect("a description");
    let elapsed = start.elapsed();
    let status = topology.status.as_ref().expect("a status");
    let cpus = status.cpus.as_ref().expect("CPUs");
    let (threads, cores) = (cpus.threads.expect("threads"), cpus.cores.unwrap_or(1));
    assert!(cores >= 1 && cores <= threads, "{cpus:?}");
    let list = |text: &str| text.parse::<switchyard_worker_contract::CpuList>().expect("a CPU list");
    let (online, usable) = (cpus.online.as_deref().map(list), cpus.usable.as_deref().map(list));
    if let (Some(online), Some(usable)) = (online, usable) {
        assert!(!usable.is_empty());
        assert_eq!(usable.intersection(&online), usable);
        // A CPU quota can lower the standard library's result but never raise it.
        assert!(std::thread::available_parallelism().is_ok_and(|count| count.get() <= usable.len()));
        let nodes: Vec<u32> = status
            .numa_nodes
            .iter()
            .filter_map(|node| node.cpus.as_deref())
            .flat_map(|cpus| list(cpus).iter().collect::<Vec<_>>())
            .collect();
        assert!(nodes.is_empty() || nodes.len() == online.len(), "every CPU is in one node: {:?}", status.numa_nodes);
    }
    assert!(status.memory_bytes.is_some_and(|bytes| bytes > 64 << 20));
    assert!(elapsed.as_millis() < 1000, "a description took {elapsed:?}");
    // A second description differs only in its time.
    let again = describe(&Roots::local("here"), Timestamp::UNIX_EPOCH).expect("a description");
    assert_eq!(topology, again);
    println!("{elapsed:?}: {topology:#?}");
}
