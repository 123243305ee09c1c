//! Faults on request: what a device does that is not the program's doing.

/// The variable; several faults are separated by commas.
pub const VARIABLE: &str = "SWITCHYARD_REFERENCE_FAULT";

/// What may be requested.
const EXPECTED: &str = "out-of-memory:N, launch:N, lost:N, hang:N, wrong:N, stale:N, exit, busy, cublaslt-bare, cudnn-version:N, cudnn-refused:KIND, cudnn-untaken:KIND, cudnn-fails:N, nccl-version:N, nccl-init:RANK, \
                        nccl-absent:RANK, nccl-error:RANK.N, nccl-silent:RANK.N, xid:GPU.N.XID, ecc:N, slowed:REASONS, celsius:N, \
                        lanes:N, process:PID.MEBIBYTES, driver-version:N, capability:N or mig";

/// What shall happen, by the numbers of calls from 1 on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// This allocation finds no memory.
    pub(crate) out_of_memory: Option<u64>,
    /// This launch fails when it runs, and all calls after it.
    pub(crate) launch: Option<u64>,
    /// The device is lost when this launch runs.
    pub(crate) lost: Option<u64>,
    /// This launch never ends.
    pub(crate) hang: Option<u64>,
    /// From this product or convolution on, the first number of each result is too large by one.
    pub(crate) wrong: Option<u64>,
    /// Of the copies of so many bytes from pinned memory to the device only the first arrives: later launches see the numbers of the first,
    /// as if these were arguments of a graph.
    pub(crate) stale: Option<u64>,
    /// What the driver has registered for the end of the process never ends.
    pub(crate) exit: bool,
    /// Another process has the device for itself.
    pub(crate) busy: bool,
    /// cuBLASLt has no algorithm for a product that anything follows.
    pub(crate) cublaslt_bare: bool,
    /// cuDNN has this version.
    pub(crate) cudnn_version: Option<u64>,
    /// cuDNN has no engine for operations of this kind; 0: for none.
    pub(crate) cudnn_refused: Option<u64>,
    /// cuDNN takes no text of a plan for operations of this kind; 0: of any.
    pub(crate) cudnn_untaken: Option<u64>,
    /// This execution of a graph of cuDNN fails when it is called.
    pub(crate) cudnn_fails: Option<u64>,
    /// NCCL has this version.
    pub(crate) nccl_version: Option<u64>,
    /// The communicators of this rank fail at once.
    pub(crate) nccl_init: Option<u64>,
    /// This rank never comes to its communicators.
    pub(crate) nccl_absent: Option<u64>,
    /// On this rank, this all-reduce of each communicator ends in an asynchronous error.
    pub(crate) nccl_error: Option<(u64, u64)>,
    /// On this rank, the numbers of this all-reduce of each communicator never leave.
    pub(crate) nccl_silent: Option<(u64, u64)>,
    /// On this GPU, when this launch runs, the driver reports this critical error.
    pub(crate) xid: Option<(u64, u64, u64)>,
    /// When this launch runs, the memory gets an error that ECC cannot mend.
    pub(crate) ecc: Option<u64>,
    /// Why the clocks are lowered: bits of `nvmlClocksThrottleReasons`.
    pub(crate) slowed: Option<u64>,
    /// Temperature.
    pub(crate) celsius: Option<u64>,
    /// Lanes of the PCIe link that are in use, of 16.
    pub(crate) lanes: Option<u64>,
    /// Another process and its MiB of memory, on each GPU.
    pub(crate) process: Option<(u64, u64)>,
    /// The driver is for this version of CUDA.
    pub(crate) driver_version: Option<u64>,
    /// Ten times the major number of the compute capability, and the minor one.
    pub(crate) capability: Option<u64>,
    /// MIG divides each GPU.
    pub(crate) mig: bool,
}

/// What the environment asks for.
pub(crate) fn requested() -> Result<Faults, String> {
    Faults::parse(&std::env::var(VARIABLE).unwrap_or_default())
}

impl Faults {
    pub(crate) fn parse(text: &str) -> Result<Faults, String> {
        let mut faults = Faults::default();
        for one in text.split(',').filter(|one| !one.is_empty()) {
            faults.add(one).ok_or_else(|| format!("{VARIABLE}: `{one}`, expected {EXPECTED}"))?;
        }
        Ok(faults)
    }

    fn add(&mut self, one: &str) -> Option<()> {
        match one {
            "busy" => self.busy = true,
            "cublaslt-bare" => self.cublaslt_bare = true,
            "exit" => self.exit = true,
            "mig" => self.mig = true,
            _ => return self.numbered(one),
        }
        Some(())
    }

    fn numbered(&mut self, one: &str) -> Option<()> {
        let (name, value) = one.split_once(':')?;
        let number = || value.parse().ok().map(Some);
        let of_rank = || {
            let (rank, number) = value.split_once('.')?;
            Some(Some((rank.parse().ok()?, number.parse().ok()?)))
        };
        let of_gpu = || {
            let (gpu, rest) = value.split_once('.')?;
            let (launch, number) = rest.split_once('.')?;
            Some(Some((gpu.parse().ok()?, launch.parse().ok()?, number.parse().ok()?)))
        };
        match name {
            "out-of-memory" => self.out_of_memory = number()?,
            "launch" => self.launch = number()?,
            "lost" => self.lost = number()?,
            "hang" => self.hang = number()?,
            "wrong" => self.wrong = number()?,
            "stale" => self.stale = number()?,
            "cudnn-version" => self.cudnn_version = number()?,
            "cudnn-refused" => self.cudnn_refused = number()?,
            "cudnn-untaken" => self.cudnn_untaken = number()?,
            "cudnn-fails" => self.cudnn_fails = number()?,
            "nccl-version" => self.nccl_version = number()?,
            "nccl-init" => self.nccl_init = number()?,
            "nccl-absent" => self.nccl_absent = number()?,
            "nccl-error" => self.nccl_error = of_rank()?,
            "nccl-silent" => self.nccl_silent = of_rank()?,
            "xid" => self.xid = of_gpu()?,
            "ecc" => self.ecc = number()?,
            "slowed" => self.slowed = number()?,
            "celsius" => self.celsius = number()?,
            "lanes" => self.lanes = number()?,
            "process" => self.process = of_rank()?,
            "driver-version" => self.driver_version = number()?,
            "capability" => self.capability = number()?,
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::Faults;

    #[test]
    fn faults_are_read_and_others_refused() {
        let faults = Faults::parse("launch:3,wrong:4,busy,nccl-error:1.2").unwrap();
        let expected =
            Faults { launch: Some(3), wrong: Some(4), busy: true, nccl_error: Some((1, 2)), ..Faults::default() };
        assert_eq!(faults, expected);
        assert_eq!(Faults::parse(""), Ok(Faults::default()));
        for wrong in ["launch", "launch:x", "fire:1", "busy:1", "nccl-error:1", "nccl-silent:1.x", "xid:1.2", "mig:1"] {
            assert!(Faults::parse(wrong).unwrap_err().contains(&format!("`{wrong}`, expected")), "{wrong}");
        }
    }
}
