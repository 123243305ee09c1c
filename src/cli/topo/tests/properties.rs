//! Property tests: every report can be rendered and drawn, and no row is wider than the window.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;
use switchyard_crds::gpu_topology::{GidGroup, GidType, LinkVia, NvLinks, PathClass, PcieLink, VirtualFunctions};

/// Names as in firmware, including nonsense.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => "[a-z]{1,6}_[0-9]{1,2}",
        1 => ".{0,40}",
        1 => Just("\u{1b}[31m<&\"'>\\\n".to_owned()),
    ]
}

fn pcie_path() -> impl Strategy<Value = Vec<String>> {
    let element = prop_oneof![4 => "0000:0[0-3]:0[0-1].0", 1 => name()];
    (prop_oneof![Just("pci0000:00".to_owned()), name()], prop::collection::vec(element, 0..9))
        .prop_map(|(root, rest)| std::iter::once(root).chain(rest).collect())
}

fn numa() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![3 => (0..3u32).prop_map(Some), 1 => Just(None), 1 => any::<u32>().prop_map(Some)]
}

fn pcie_link() -> impl Strategy<Value = Option<PcieLink>> {
    let number = || prop::option::of(prop_oneof![0..20u32, any::<u32>()]);
    prop::option::of((number(), number(), number(), number())).prop_map(|link| {
        link.map(|(generation, max_generation, width, max_width)| PcieLink {
            generation,
            max_generation,
            width,
            max_width,
        })
    })
}

fn gpu() -> impl Strategy<Value = Gpu> {
    let index = prop_oneof![3 => 0..20u32, 1 => any::<u32>()];
    let model = prop::option::of(prop_oneof![Just("H100".to_owned()), Just("GB200".to_owned()), name()]);
    let down = prop::collection::vec(any::<u32>(), 0..4);
    (index, model, numa(), pcie_path(), pcie_link(), prop::option::of((any::<u32>(), down)), prop::option::of(name()))
        .prop_map(|(index, model, numa_node, pcie_path, pcie_link, nvlinks, action)| Gpu {
            index,
            model,
            numa_node,
            pcie_path,
            pcie_link,
            nvlinks: nvlinks.map(|(up, down)| NvLinks { up, down }),
            health: action.map(|recovery_action| GpuHealth { recovery_action }),
            ..Gpu::default()
        })
}

fn nic() -> impl Strategy<Value = Nic> {
    let rate = prop::option::of(prop_oneof![Just(400_000u64), any::<u64>()]);
    let gids = prop::collection::vec(any::<u32>(), 0..3);
    (name(), prop::option::of(name()), rate, numa(), pcie_path(), pcie_link(), gids, any::<u32>()).prop_map(
        |(name, rdma_device, rate_megabits_per_second, numa_node, pcie_path, pcie_link, gids, total)| Nic {
            name,
            rdma_device,
            rate_megabits_per_second,
            numa_node,
            pcie_path,
            pcie_link,
            gids: gids
                .into_iter()
                .map(|count| GidGroup { kind: GidType::RoCEv2, family: None, count, first_index: count })
                .collect(),
            virtual_functions: Some(VirtualFunctions { enabled: total / 2, total }),
            ..Nic::default()
        },
    )
}

fn link(gpus: usize) -> impl Strategy<Value = Link> {
    let end = move || (0..gpus.max(1) + usize::from(gpus == 0)).prop_map(|gpu| format!("GPU-{gpu}"));
    let count = prop::option::of(prop_oneof![4 => 0..20u32, 1 => any::<u32>()]);
    let class = prop::option::of(prop_oneof![Just(PathClass::PIX), Just(PathClass::SYS)]);
    (end(), end(), any::<bool>(), count, any::<bool>(), prop::option::of(any::<u64>()), class).prop_map(
        |(a, b, nvlink, count, switch, megabytes_per_second, path_class)| Link {
            a,
            b,
            kind: if nvlink { LinkKind::NVLink } else { LinkKind::PCIe },
            count,
            via: Some(if switch { LinkVia::Switch } else { LinkVia::Direct }),
            megabytes_per_second,
            path_class,
        },
    )
}

fn machine() -> impl Strategy<Value = GPUTopology> {
    let numa_nodes = prop::collection::vec((0..4u32, prop::option::of(".{0,30}"), any::<u64>()), 0..4);
    // Links with existing and missing UUIDs, and from a GPU to itself; the latter two are
    // contradictions.
    (name(), prop::collection::vec(gpu(), 0..11), prop::collection::vec(nic(), 0..12), numa_nodes)
        .prop_flat_map(|(name, gpus, nics, nodes)| {
            let count = gpus.len();
            (Just((name, gpus, nics, nodes)), prop::collection::vec(link(count), 0..12), any::<bool>())
        })
        .prop_map(|((name, mut gpus, nics, nodes), mut links, is_tidy)| {
            gpus.iter_mut().enumerate().for_each(|(number, gpu)| gpu.uuid = format!("GPU-{number}"));
            if is_tidy {
                links.retain(|link| link.a != link.b && !gpus.is_empty());
            }
            let node = |(id, cpus, memory)| NumaNode { id, cpus, memory_bytes: Some(memory), distances: vec![id] };
            let status = GPUTopologyStatus {
                numa_nodes: nodes.into_iter().map(node).collect(),
                gpus,
                nics,
                links,
                ..GPUTopologyStatus::default()
            };
            topology(&name, status)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_report_has_a_screen(machine in machine(), width in 40..180usize, full: bool) {
        let view = View { width, full, seen: Some("12s ago".into()) };
        for line in render(&machine, &view).lines() {
            prop_assert!(line.len() <= width, "{width}: {line}");
            prop_assert!(line.is_ascii() && !line.contains(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn any_report_has_drawings(machine in machine()) {
        let drawn = dot(&machine);
        prop_assert!(drawn.lines().all(|line| !line.contains(char::is_control)), "{drawn:?}");
        // Unescaped quotes come in pairs on every line.
        for line in drawn.lines() {
            let bare = line.replace("\\\\", "").replace("\\\"", "");
            prop_assert!(bare.matches('"').count().is_multiple_of(2), "{line}");
        }
        let picture = svg(&machine);
        let mut open = 0_i64;
        for tag in picture.split('<').skip(1) {
            prop_assert!(tag.matches('>').count() == 1, "{tag}");
            open += if tag.starts_with('/') { -1 } else if tag.contains("/>") { 0 } else { 1 };
            prop_assert!(open >= 0, "{tag}");
        }
        prop_assert_eq!(open, 0);
        let entities = ["&amp;", "&lt;", "&gt;", "&quot;", "&#39;"];
        let plain = entities.iter().fold(picture, |text, entity| text.replace(entity, ""));
        prop_assert!(!plain.contains('&'), "{plain}");
    }
}
