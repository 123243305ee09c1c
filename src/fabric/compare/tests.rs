//! Logs as written by NCCL releases and our engine, compared with the forecast.

use super::*;
use ObservedVerdict::{AsForecast, OtherTransport, Slower, Unknown};
use Transport::{NVLink, PCIe, Plugin, RDMA, SharedMemory, TCP};

const IB: &str = "n:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
n:7:19 [0] NCCL INFO Using network IB
n:7:19 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
n:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n:7:19 [0] NCCL INFO Connected all rings
";
const STAGED: &str = "n:7:19 [0] NCCL INFO Using network IB
n:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0
n:7:19 [0] NCCL INFO Connected all rings
";
/// 2.27 and newer.
const SOCKET: &str = "n:152:386 [0] NCCL INFO NET/IB : No device found.
n:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
n:152:386 [0] NCCL INFO Initialized NET plugin Socket
n:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
n:152:386 [0] NCCL INFO Using network Socket
n:152:386 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
";
/// 2.4, which has no line for its network; with mpirun prefixes.
const OLD: &str = "[1,0]<stdout>:n:1475:2146 [0] NCCL INFO Ring 00 : 3 -> 4 [send] via NET/Socket/0\n";
const EFA: &str = "n:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
n:21:21 [0] NCCL INFO Using network AWS Libfabric
n:21:21 [0] NCCL INFO Channel 00 : 1[101d0] -> 8[101c0] [send] via NET/AWS Libfabric/0/GDRDMA
n:21:21 [0] NCCL INFO comm 0x1 rank 0 nranks 16 cudaDev 0 busId 101c0 - Init COMPLETE
";
const OFI_TCP: &str = "n:21:21 [0] NCCL INFO NET/OFI Selected provider is tcp, fabric is 10.0.0.0/8 (found 1 nics)
n:21:21 [0] NCCL INFO Using network Libfabric
n:21:21 [0] NCCL INFO comm 0x1 rank 0 nranks 16 cudaDev 0 busId 101c0 - Init COMPLETE
";
/// An NVLink domain across nodes: NCCL names a network but does not use it.
const DOMAIN: &str = "n:1:1 [0] NCCL INFO Using network Socket
n:1:1 [0] NCCL INFO Channel 00/0 : 4[0] -> 3[3] via P2P/MNNVL
n:1:1 [0] NCCL INFO Connected all rings
";
const HOST: &str = "n:1:1 [0] NCCL INFO Using network Socket
n:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 4[4] via SHM/direct/direct
n:1:1 [0] NCCL INFO Connected all rings
";
const OLD_HOST: &str = "n:1:1 [1] NCCL INFO Channel 00 : 1[1a000] -> 2[af000] via direct shared memory\n";
const PEERS: &str = "n:1:1 [1] NCCL INFO Channel 00 : 2[af000] -> 3[b1000] via P2P/IPC\n";
const NOTHING: &str = "Epoch 1\nloss 2.5\n";
const OWN: &str = r#"{"event":"ready","rank":0,"pid":1,"host":"a","cpus":"0","threads":1,"kernel":"avx2","address":"","transport":"hierarchical","links":[{"by":"sharedMemory","ranks":"1"},{"by":"tcp","rank":2,"local":"10.0.0.1:5","remote":"10.0.0.2:6","interface":"eth0"}],"allReduceMs":1.0}
"#;
const OWN_TCP: &str = r#"{"event":"ready","rank":0,"pid":1,"host":"a","cpus":"0","threads":1,"kernel":"avx2","address":"","transport":"tcp","links":[{"by":"tcp","rank":1,"local":"10.0.0.1:5","remote":"10.0.0.1:6","interface":"lo"}],"allReduceMs":1.0}
"#;
/// Two pods on one machine.
const OWN_SHARED: &str = r#"{"event":"ready","rank":0,"pid":1,"host":"a","cpus":"0","threads":1,"kernel":"avx2","address":"","transport":"shm","links":[{"by":"sharedMemory","ranks":"1"}],"allReduceMs":1.0}
"#;

fn predicted(transport: Transport, several_nodes: bool) -> Prediction {
    Prediction { transport, gpu_direct: None, several_nodes, is_own: false, shares_memory: false }
}

fn seen(log: &str) -> LogObservation {
    LogObservation { is_complete: true, ..LogObservation::of(log, 1) }
}

#[test]
fn every_log_yields_its_verdict() {
    let direct = |gpu_direct| Prediction { gpu_direct, ..predicted(RDMA, true) };
    let own = |transport, several, shares| Prediction {
        is_own: true,
        shares_memory: shares,
        ..predicted(transport, several)
    };
    let table: [(Prediction, &str, ObservedVerdict, Option<Transport>); 27] = [
        (predicted(RDMA, true), IB, AsForecast, Some(RDMA)),
        (direct(Some(GpuDirect::Yes)), IB, AsForecast, Some(RDMA)),
        (direct(Some(GpuDirect::Yes)), STAGED, Slower, Some(RDMA)),
        (direct(Some(GpuDirect::No)), STAGED, AsForecast, Some(RDMA)),
        (predicted(RDMA, true), SOCKET, OtherTransport, Some(TCP)),
        (predicted(RDMA, true), OLD, OtherTransport, Some(TCP)),
        (predicted(RDMA, true), NOTHING, Unknown, None),
        (predicted(RDMA, true), PEERS, Unknown, None),
        (predicted(RDMA, true), DOMAIN, AsForecast, Some(NVLink)),
        (predicted(Plugin, true), EFA, AsForecast, Some(Plugin)),
        (predicted(Plugin, true), OFI_TCP, OtherTransport, Some(TCP)),
        (predicted(Plugin, true), SOCKET, OtherTransport, Some(TCP)),
        (predicted(Plugin, true), IB, Slower, Some(RDMA)),
        (predicted(NVLink, true), DOMAIN, AsForecast, Some(NVLink)),
        (predicted(NVLink, true), IB, Slower, Some(RDMA)),
        (predicted(NVLink, true), SOCKET, OtherTransport, Some(TCP)),
        (predicted(TCP, true), SOCKET, AsForecast, Some(TCP)),
        (predicted(TCP, true), IB, AsForecast, Some(RDMA)),
        (predicted(NVLink, false), PEERS, AsForecast, Some(NVLink)),
        (predicted(NVLink, false), HOST, Slower, Some(SharedMemory)),
        (predicted(PCIe, false), OLD_HOST, Slower, Some(SharedMemory)),
        (predicted(SharedMemory, false), HOST, AsForecast, Some(SharedMemory)),
        (predicted(NVLink, false), SOCKET, OtherTransport, Some(TCP)),
        (own(TCP, true, true), OWN, AsForecast, Some(TCP)),
        (own(TCP, true, false), OWN_SHARED, AsForecast, Some(SharedMemory)),
        (own(SharedMemory, false, true), OWN_TCP, OtherTransport, Some(TCP)),
        (own(TCP, true, true), OWN_TCP, OtherTransport, Some(TCP)),
    ];
    for (number, (predicted, log, verdict, transport)) in table.into_iter().enumerate() {
        let found = compare(predicted, &[("gpu-1", Some(&seen(log)))]).unwrap_or_else(|| panic!("{number}: {log}"));
        assert_eq!((found.verdict, found.transport), (verdict, transport), "{number}: {predicted:?} {log} {found:?}");
    }
}

#[test]
fn message_names_nodes_forecast_and_observation() {
    let (good, bad) = (seen(IB), seen(SOCKET));
    let nodes = [("gpu-1", Some(&good)), ("gpu-2", Some(&bad)), ("gpu-3", None)];
    let found = compare(Prediction { gpu_direct: Some(GpuDirect::Yes), ..predicted(RDMA, true) }, &nodes).unwrap();
    insta::assert_snapshot!(found.message, @"forecast RDMA with GPUDirect between nodes; 1 of 3 nodes (gpu-2): Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0");
    let silent = seen(NOTHING);
    let found = compare(predicted(RDMA, true), &[("gpu-1", Some(&silent))]).unwrap();
    assert!(found.message.contains("NCCL_DEBUG=INFO"), "{}", found.message);
}

#[test]
fn no_verdict_until_all_report_or_one_differs() {
    let good = seen(IB);
    assert_eq!(compare(predicted(RDMA, true), &[("a", Some(&good)), ("b", None)]), None);
    let early = LogObservation::of("n:1:1 [0] NCCL INFO Using network Socket\n", 8);
    assert!(!early.is_complete);
    assert_eq!(compare(predicted(RDMA, true), &[("a", Some(&early))]), None, "NVLink may still carry the data");
    let late = LogObservation { is_complete: true, ..early };
    assert_eq!(compare(predicted(RDMA, true), &[("a", Some(&late))]).map(|found| found.verdict), Some(OtherTransport));
}

#[test]
fn log_is_complete_once_every_rank_reports_its_transport() {
    assert!(LogObservation::of(OWN, 1).is_complete && !LogObservation::of(OWN, 2).is_complete);
    assert!(
        LogObservation::of(IB, 8).is_complete
            && LogObservation::of(EFA, 8).is_complete
            && !LogObservation::of(SOCKET, 8).is_complete
    );
    assert!(!LogObservation::of("{\"event\": broken\n\u{0}NCCL INFO \nNCCL INFO Channel via \n", 1).is_complete);
}
