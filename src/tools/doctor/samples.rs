//! A real program's line for every known error, with its source. A test fails if an entry is
//! changed or lost, or if it matches a healthy log.
//!
//! The lines are from the named sources and public logs, with made-up numbers and names. "(log)"
//! marks lines from a public log only, because the source is closed or was not checked.

use super::known::{Role, known};
use super::matcher::Matcher;
use super::{Diagnosis, Doctor};
use std::collections::BTreeSet;

/// Id, line, origin.
const SAMPLES: [(&str, &str, &str); 99] = [
    (
        "out-of-memory",
        "[12.3] Out of memory: Killed process 4711 (python3) total-vm:91234kB, anon-rss:81234kB",
        "linux mm/oom_kill.c",
    ),
    ("out-of-memory", "container trainer ended: OOMKilled, exit code 137", "kubernetes pkg/kubelet/kuberuntime"),
    (
        "killed",
        "traceback : Signal 9 (SIGKILL) received by PID 4711",
        "pytorch torch/distributed/elastic/multiprocessing/errors/__init__.py",
    ),
    (
        "segmentation-fault",
        "traceback : Signal 11 (SIGSEGV) received by PID 4711",
        "pytorch torch/distributed/elastic/multiprocessing/errors/__init__.py",
    ),
    (
        "shared-memory-full",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-7Kx2 (size 9637888)",
        "nccl src/misc/shmutils.cc",
    ),
    (
        "shared-memory-full",
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error.",
        "pytorch torch/csrc/DataLoader.cpp",
    ),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/ckpt/model.pt'", "glibc strerror(ENOSPC)"),
    (
        "evicted",
        "Pod status: Evicted: The node was low on resource: memory.",
        "kubernetes pkg/kubelet/eviction/helpers.go",
    ),
    (
        "library-missing",
        "python: error while loading shared libraries: libnccl.so.2: cannot open shared object file",
        "glibc elf/dl-load.c",
    ),
    ("too-many-files", "OSError: [Errno 24] Too many open files", "glibc strerror(EMFILE)"),
    (
        "terminated",
        "W1120 14:07:31 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 12 closing signal SIGTERM",
        "pytorch torch/distributed/elastic/multiprocessing/api.py",
    ),
    (
        "gpu-out-of-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "pytorch c10/cuda/CUDACachingAllocator.cpp",
    ),
    ("gpu-lost", "NVRM: Xid (PCI:0000:ab:00): 79, pid=1, GPU has fallen off the bus.", "XID catalogue"),
    (
        "gpu-memory-fault",
        "NVRM: Xid (PCI:0000:ab:00): 94, pid=4711, Contained: SM (0x1). RST: No, D-RST: No",
        "XID catalogue",
    ),
    (
        "nvlink-fault",
        "NVRM: Xid (PCI:0000:ab:00): 74, pid=4711, NVLink: fatal error detected on link 7",
        "XID catalogue",
    ),
    (
        "gpu-firmware-fault",
        "NVRM: Xid (PCI:0000:ab:00): 119, pid=4711, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
        "XID catalogue",
    ),
    ("driver-mismatch", "Failed to initialize NVML: Driver/library version mismatch", "nvmlErrorString (log)"),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available", "pytorch c10/cuda/CUDAFunctions.cpp"),
    ("fabric-manager", "CUDA error: system not yet initialized", "cudaGetErrorString(802), CUDA runtime documentation"),
    ("imex", "NCCL WARN Cuda failure 800 'operation not permitted'", "nccl#1925 (log)"),
    (
        "no-kernel-image",
        "CUDA error: no kernel image is available for execution on the device",
        "cudaGetErrorString(209), CUDA runtime documentation",
    ),
    (
        "gpu-program-fault",
        "CUDA error: an illegal memory access was encountered",
        "cudaGetErrorString(700), CUDA runtime documentation",
    ),
    (
        "unified-memory",
        "NCCL WARN Cuda failure 304 'OS call failed or operation not supported on this OS'",
        "cudaGetErrorString(304), CUDA runtime documentation",
    ),
    ("xid", "NVRM: Xid (PCI:0000:ab:00): 43, pid=4711, Ch 00000010", "XID catalogue"),
    (
        "gpu-memory-fault",
        "warning: rank 3: GPU 0000:17:00.0: XID 94 (contained memory error)",
        "switchyard worker/contract/src/gpu.rs",
    ),
    (
        "gpu-firmware-fault",
        "error: rank 3: the GPU is gone; the driver reported for GPU 0000:17:00.0: XID 119 (GSP RPC timeout), in step 2",
        "switchyard worker/src/train/watchdog/mod.rs",
    ),
    ("nccl-no-interface", "NCCL WARN Bootstrap : no socket interface found", "nccl src/bootstrap.cc"),
    (
        "nccl-duplicate-gpu",
        "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "nccl src/init.cc",
    ),
    (
        "rdma-memlock",
        "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "nccl src/misc/ibvwrap.cc",
    ),
    (
        "rdma-registration",
        "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address",
        "nccl src/misc/ibvwrap.cc",
    ),
    (
        "rdma-gid",
        "NCCL WARN Call to ibv_modify_qp failed with error No data available errno 61",
        "nccl src/misc/ibvwrap.cc",
    ),
    (
        "rdma-unreachable",
        "NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_3:1, curr state INIT, next state RTR",
        "nccl src/misc/ibvwrap.cc, 2.26 and newer",
    ),
    (
        "nccl-graph-file",
        "graph/search.cc:655 NCCL WARN XML Import Channel : dev 3 not found.",
        "nccl src/graph/search.cc",
    ),
    (
        "nccl-mismatched-collective",
        "NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 39.",
        "nccl src/init.cc",
    ),
    (
        "nccl-watchdog-stuck",
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        "pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    ),
    (
        "efa-missing",
        "nccl_net_ofi_create_plugin:1067 NCCL WARN NET/OFI aws-ofi-nccl initialization failed",
        "aws-ofi-nccl src/nccl_ofi_api.cpp",
    ),
    ("gpudirect-off", "NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "nccl src/transport/net_ib.cc"),
    (
        "peer-access",
        "NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported between these two devices",
        "cudaGetErrorString(217), CUDA runtime documentation",
    ),
    (
        "out-of-memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=13749.batch. Some of the step tasks have been OOM Killed.",
        "slurm src/plugins/task/cgroup (log)",
    ),
    ("bus-error", "srun: error: node-b: task 289: Bus error", "slurm (log)"),
    (
        "evicted",
        "slurmstepd: error: *** STEP 12.0 ON node-a CANCELLED AT 2026-11-20T14:03:12 DUE TO PREEMPTION ***",
        "slurm (log)",
    ),
    (
        "time-limit",
        "slurmstepd: error: *** JOB 12 ON node-a CANCELLED AT 2026-11-20T14:03:12 DUE TO TIME LIMIT ***",
        "slurm (log)",
    ),
    ("terminated", "slurmstepd: error: *** STEP 12.0 ON node-a CANCELLED AT 2026-11-20T14:03:12 ***", "slurm (log)"),
    ("gpu-out-of-memory", "RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB", "pytorch for ROCm (log)"),
    (
        "nvlink-fault",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "pytorch#58155 (log)",
    ),
    ("no-gpu", "RuntimeError: No HIP GPUs are available", "pytorch for ROCm (log)"),
    ("rdma-port", "NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", "nccl src/transport/net_ib.cc"),
    (
        "rdma-port",
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : local catastrophic error",
        "nccl src/transport/net_ib.cc; rdma-core libibverbs/enum_strs.c",
    ),
    ("nccl-network-plugin", "NCCL WARN Failed to initialize any NET plugin", "nccl src/plugin/net.cc"),
    ("nccl-network-plugin", "NCCL WARN Error: network IB not found.", "nccl src/net.cc, up to 2.26"),
    (
        "nccl-versions",
        "NCCL WARN Mismatched NCCL version detected : rank 0 version 22703 rank 8 version 22005",
        "nccl src/init.cc",
    ),
    ("nccl-topology-file", "NCCL WARN Attribute arch of node cpu not found", "nccl src/graph/xml.h"),
    (
        "nccl-bad-setting",
        "NCCL WARN Error : no algorithm/protocol available for function AllReduce with datatype ncclFloat32.",
        "nccl src/enqueue.cc",
    ),
    (
        "nccl-connect",
        "NCCL WARN socketPollConnect: connect to 10.0.0.3<4711> returned Connection refused (111)",
        "nccl src/misc/socket.cc",
    ),
    (
        "nccl-connect",
        "NCCL WARN Call to connect to 10.0.0.3<4711> failed : Connection refused",
        "nccl src/misc/socket.cc, up to 2.17",
    ),
    (
        "rdma-retry",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.3<4711> with status=12 opcode=0 len=0 vendor err 129 (Send)",
        "nccl src/transport/net_ib.cc",
    ),
    (
        "rdma-retry",
        "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        "nccl src/transport/net_ib.cc, up to 2.18",
    ),
    (
        "rdma-retry",
        "NCCL WARN NET/IB: Got completion from peer 10.2.0.5<33092> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)",
        "nccl src/transport/net_ib/p2p.cc, 2.28 and newer",
    ),
    (
        "rdma-access",
        "gpu-1:7:19 [0] transport/net_ib.cc:180 NCCL WARN NET/IB : mlx5_0:1 async fatal event on QP (0x7f69): local access violation work queue error",
        "nccl#1905 (log)",
    ),
    (
        "rdma-access",
        "NET/IB: Got completion from peer 10.0.0.2<38081> with status=IBV_WC_REM_ACCESS_ERR(10) opcode=IBV_WC_RDMA_WRITE(1)",
        "nccl 2.28 (log)",
    ),
    (
        "efa-request",
        "libfabric:7:1708520807::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address",
        "aws-ofi-nccl#346 (log)",
    ),
    (
        "nccl-timeout",
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)",
        "pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    ),
    (
        "nccl-cuda-error",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        "nccl-remote-error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        "nccl-system-error",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        "nccl-internal-error",
        "ncclInternalError: Internal check failed.",
        "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        "nccl-invalid-usage",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        "rdma-flush",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.3<4711> with status=5 opcode=0 len=0 vendor err 249",
        "nccl src/transport/net_ib.cc",
    ),
    (
        "rdma-flush",
        "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 5, opcode 0, len 0, vendor err 249",
        "nccl src/transport/net_ib.cc, up to 2.18",
    ),
    (
        "nccl-abort",
        "To avoid data inconsistency, we are taking the entire process down.",
        "pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    ),
    (
        "connection-closed",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711",
        "gloo gloo/transport/tcp/pair.cc",
    ),
    ("nccl-over-tcp", "NCCL INFO Using network Socket", "nccl src/init.cc"),
    ("nccl-over-tcp", "NCCL INFO Failed to initialize NET plugin IB", "nccl src/plugin/net.cc"),
    ("gloo-address", "RuntimeError: Unable to find address for: eth9", "gloo gloo/transport/tcp/device.cc"),
    (
        "gloo-mesh",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144]",
        "pytorch torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    ),
    (
        "gloo-error",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "gloo gloo/common/logging.h",
    ),
    (
        "gloo-timeout",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "gloo gloo/transport/tcp/unbound_buffer.cc",
    ),
    ("address-in-use", "OSError: [Errno 98] Address already in use", "glibc strerror(EADDRINUSE)"),
    (
        "rendezvous",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (a, 29400).",
        "pytorch torch/csrc/distributed/c10d/socket.cpp",
    ),
    (
        "rendezvous",
        "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
        "pytorch torch/csrc/distributed/c10d (log)",
    ),
    (
        "store-closed",
        "recvValue failed on SocketImpl(fd=3): Connection was aborted",
        "pytorch torch/csrc/distributed/c10d/TCPStore.cpp",
    ),
    (
        "child-failed",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "pytorch torch/distributed/elastic/multiprocessing/errors/__init__.py",
    ),
    (
        "data-loader",
        "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly",
        "pytorch torch/utils/data/dataloader.py",
    ),
    ("exception", "Traceback (most recent call last):", "cpython Python/traceback.c"),
    ("mpi-daemons", "PRTE was unable to reliably start one or more daemons.", "prrte src/mca/plm (log)"),
    ("mpi-ssh", "a@b: Permission denied (publickey,password).", "openssh sshconnect2.c"),
    (
        "mpi-slots",
        "There are not enough slots available in the system to satisfy the 8",
        "open-mpi orte/mca/rmaps/base/help-orte-rmaps-base.txt",
    ),
    (
        "mpi-interface",
        "WARNING: Open MPI failed to TCP connect to a peer MPI process.  This",
        "open-mpi opal/mca/btl/tcp/help-mpi-btl-tcp.txt",
    ),
    (
        "mpi-abort",
        "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
        "open-mpi ompi/mpi/help/help-mpi-api.txt",
    ),
    (
        "mpi-ended",
        "Primary job  terminated normally, but 1 process returned",
        "open-mpi orte/tools/orterun/help-orterun.txt",
    ),
    (
        "ucx-error",
        "[1700.1] [gpu-1:12 :0] ib_mlx5_log.c:171 UCX  ERROR Transport retry count exceeded on mlx5_0:1",
        "ucx src/uct/ib/mlx5/ib_mlx5_log.c",
    ),
    (
        "horovod-stall",
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting",
        "horovod horovod/common/stall_inspector.cc",
    ),
    ("worker-data", "error[SY0301]: the training data is too short", "switchyard src/local"),
    ("worker-checkpoint", "spec.checkpoint.path: cannot resume: no such step", "switchyard worker/src/train/error.rs"),
    (
        "worker-diverged",
        "expected a finite number; lower optimizer.learningRate or set optimizer.gradientClipNorm",
        "switchyard worker/src/train/error.rs",
    ),
    (
        "worker-hung",
        "stands still for 31 s, since 12:03:04 UTC, in step 17: forward pass of micro-batch 0 (process 4711)",
        "switchyard worker/src/train/watchdog/mod.rs",
    ),
    ("worker-refused", "refused by rank 0: another job", "switchyard worker/src/comm/error.rs"),
    ("worker-missing-ranks", "ranks did not arrive within 60 s: 1", "switchyard worker/src/comm/error.rs"),
    ("worker-silent", "error: rank 2: no sign of life for 10.0 s", "switchyard worker/src/comm/pulse.rs"),
];

/// Lines of our own worker that are recognised by their form, and one remark.
const BY_FORM: [(&str, &str); 3] = [
    ("worker-failure", "error: rank 0: panicked: index out of bounds"),
    ("worker-peer", "rank 1: a peer failed; the root cause is on another rank"),
    ("worker-not-saved", "warning: the checkpoint of step 40 is not saved: permission denied"),
];

/// Lines of healthy programs.
const HEALTHY: [&str; 16] = [
    "gpu-1:7:7 [0] NCCL INFO NCCL version 2.27.5+cuda12.9",
    "gpu-1:7:7 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
    "gpu-1:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
    "gpu-1:7:19 [0] NCCL INFO Assigned NET plugin IB to comm",
    "gpu-1:7:19 [0] NCCL INFO Using network IB",
    "gpu-1:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA",
    "gpu-1:7:19 [0] NCCL INFO Connected all rings",
    "gpu-1:7:19 [0] NCCL INFO comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1b000 - Init COMPLETE",
    "W1120 14:03:12.1 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable for each process to be 1",
    "epoch 3 step 40 loss 2.5 error rate 0.1",
    "Saving checkpoint to /ckpt/step-40",
    "I1120 14:03:12 coordinator connected to 10.0.0.1:29400",
    "{\"event\":\"evaluation\",\"step\":3,\"loss\":2.5}",
    "{\"event\":\"summary\",\"step\":1,\"totalSteps\":9,\"loss\":2.5,\"itemsPerSecond\":10.0,\"item\":\"tokens\",\"communicationPercent\":1.0,\"inputPercent\":0.0}",
    "nvidia-fabricmanager: Successfully configured all the available NVSwitches to route GPU NVLink traffic.",
    "mlx5_core 0000:1a:00.0 ib0: Link up",
];

#[test]
fn every_known_error_is_found_in_a_line_of_its_program() {
    let mut matcher = Matcher::new().unwrap();
    for (id, line) in SAMPLES.iter().map(|(id, line, _)| (id, line)).chain(BY_FORM.iter().map(|(id, line)| (id, line)))
    {
        let found = matcher.find(line.as_bytes()).map(|(_, known)| known.id);
        assert_eq!(found, Some(*id), "{line}");
    }
    let sampled: BTreeSet<&str> = SAMPLES.iter().map(|(id, ..)| *id).chain(BY_FORM.iter().map(|(id, _)| *id)).collect();
    let missing: Vec<&str> = known().map(|known| known.id).filter(|id| !sampled.contains(id)).collect();
    assert!(missing.is_empty(), "no sample of {missing:?}");
    assert!(SAMPLES.iter().all(|(_, _, source)| !source.is_empty()));
}

#[test]
fn a_missing_row_fails_its_sample() {
    for lost in known() {
        let mut rest = Matcher::of(known().filter(|known| known.id != lost.id)).unwrap();
        let lines = SAMPLES.iter().map(|(id, line, _)| (*id, *line)).chain(BY_FORM);
        for (_, line) in lines.filter(|(id, _)| *id == lost.id) {
            assert_ne!(rest.find(line.as_bytes()).map(|(_, known)| known.id), Some(lost.id), "{line}");
        }
    }
}

fn read(lines: &[&str]) -> Diagnosis {
    let mut doctor = Doctor::new().unwrap();
    let mut log = doctor.open("rank-0.log", 2026);
    lines.iter().for_each(|line| doctor.line(&mut log, line.as_bytes()));
    doctor.diagnosis()
}

#[test]
fn healthy_logs_have_no_known_error() {
    assert_eq!(read(&HEALTHY).attempts, []);
    // TCP without RDMA is a remark rather than an error, in all of NCCL's wordings.
    let tcp = read(&[
        "gpu-1:7:19 [0] NCCL INFO NET/IB : No device found.",
        "gpu-1:7:19 [0] NCCL INFO Failed to initialize NET plugin IB",
        "gpu-1:7:19 [0] NCCL INFO Initialized NET plugin Socket",
        "gpu-1:7:19 [0] NCCL INFO Using network Socket",
    ]);
    let [attempt] = tcp.attempts.as_slice() else { panic!("{tcp:?}") };
    assert!(attempt.first.is_none() && attempt.followed.is_empty() && attempt.other_causes.is_empty(), "{attempt:?}");
    assert!(attempt.remarks.iter().all(|remark| remark.error.role == Role::Remark.word()), "{attempt:?}");
}
