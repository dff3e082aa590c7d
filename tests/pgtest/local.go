package pgtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
)

// A cluster is a throw-away PostgreSQL in a directory of its own: data, log and socket. It listens
// on the socket only, which nobody but its user and root can reach.
type cluster struct {
	bin   string // where pg_ctl is
	made  string // where the initdb is that makes the data directory
	dir   string
	owner *syscall.Credential // root may not run PostgreSQL; nil: run as oneself
	guard *guard
}

// tempDir is not os.TempDir, which may be long: a socket's path is limited to about 100 bytes. Main moves it into memory.
var tempDir = cmp.Or(os.Getenv("RATELIMIT_TEST_DIR"), "/tmp")

// inMemory returns a directory in memory that has room for the clusters of tests, or else dir. A database is 300 files: to
// copy and drop it takes a quarter of the time there.
func inMemory(dir string) string {
	const shared, room = "/dev/shm", 4 << 30
	var fs syscall.Statfs_t
	if syscall.Statfs(shared, &fs) != nil || fs.Bavail*uint64(fs.Bsize) < room {
		return dir
	}
	return shared
}

func startCluster(ctx context.Context, settings []string) (host, error) {
	return startClusterIn(ctx, tempDir, settings)
}

func startClusterIn(ctx context.Context, parent string, settings []string) (host, error) {
	bin, err := findBinaries(ctx)
	if err != nil {
		return nil, err
	}
	return startPrograms(ctx, bin, bin, parent, prepareExtensions(ctx, bin), settings)
}

// startPrograms starts a cluster of the programs in bin. The initdb is that of made.
func startPrograms(ctx context.Context, bin, made, parent string, cron bool, settings []string) (host, error) {
	c, err := newCluster(bin, made, parent)
	if err != nil {
		return nil, err
	}
	if err := c.initialize(ctx, cron, settings); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// newCluster makes the directory of a cluster in parent, and sees to it that it is removed.
func newCluster(bin, made, parent string) (c *cluster, err error) {
	c = &cluster{bin: bin, made: made}
	if c.owner, err = unprivileged(); err != nil {
		return nil, err
	}
	if c.dir, err = os.MkdirTemp(parent, "ratelimit-"); err != nil {
		return nil, err
	}
	if c.owner != nil {
		if err := os.Chown(c.dir, int(c.owner.Uid), int(c.owner.Gid)); err != nil {
			return nil, errors.Join(err, os.RemoveAll(c.dir))
		}
	}
	c.guard, err = startGuard(c.owner, `kill -s CONT "$(head -n 1 "$2/data/postmaster.pid")" 2>/dev/null # if it is frozen
"$1/pg_ctl" stop --pgdata "$2/data" --mode immediate; rm -rf "$2"`, bin, c.dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir))
	}
	return c, nil
}

func (c *cluster) initialize(ctx context.Context, cron bool, settings []string) error {
	if err := c.populate(ctx); err != nil {
		return err
	}
	own := []string{"port=5432", "listen_addresses=", "unix_socket_directories=" + c.dir,
		"dynamic_shared_memory_type=mmap"} // in the data directory: of a killed server nothing is left elsewhere
	if cron {
		own = append(own,
			"shared_preload_libraries=pg_cron",
			"cron.use_background_workers=on", // jobs need no way to log in
		)
	}
	if err := c.configure(slices.Concat(own, defaults, settings)); err != nil {
		return err
	}
	return c.Start(ctx)
}

// isTest is true in a test binary, which starts many servers: Main sets it.
var isTest bool

// pristine has the clusters of this process that initdb made and nobody has started, by the folder of that initdb.
var pristine = struct {
	sync.Mutex
	of map[string]*cluster
}{of: map[string]*cluster{}}

// populate makes the data directory: the first time by initdb, then by a copy, which takes a tenth of the time in memory. A program
// that starts one server has no use for a second directory.
func (c *cluster) populate(ctx context.Context) error {
	if !isTest {
		return c.initdb(ctx)
	}
	pristine.Lock()
	defer pristine.Unlock()
	first := pristine.of[c.made]
	if first == nil {
		var err error
		if first, err = newCluster(c.made, c.made, tempDir); err != nil {
			return err
		}
		if err := first.initdb(ctx); err != nil {
			return errors.Join(err, first.Close())
		}
		pristine.of[c.made] = first
	}
	return c.run(ctx, "cp", "-R", first.data(), c.data())
}

func (c *cluster) initdb(ctx context.Context) error {
	return c.run(ctx, filepath.Join(c.made, "initdb"), "--pgdata", c.data(), "--username", "postgres", "--auth", "trust",
		"--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions")
}

// configure appends to the configuration file: the last of several lines for one setting counts.
func (c *cluster) configure(settings []string) error {
	file, err := os.OpenFile(filepath.Join(c.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	for _, setting := range settings {
		name, value, _ := strings.Cut(setting, "=")
		_, err = fmt.Fprintf(file, "%s = '%s'\n", name, strings.ReplaceAll(value, "'", "''"))
		if err != nil {
			break
		}
	}
	return errors.Join(err, file.Close())
}

func (c *cluster) URL(database string) string {
	if database == "" {
		database = "postgres"
	}
	query := url.Values{"host": {c.dir}, "port": {"5432"}, "user": {"postgres"}}
	return "postgres:///" + url.PathEscape(database) + "?" + query.Encode()
}

func (c *cluster) Start(ctx context.Context) error {
	err := c.run(ctx, c.program("pg_ctl"), "start", "--pgdata", c.data(), "--log", c.log(), "--wait", "--silent")
	if err != nil {
		log, _ := os.ReadFile(c.log())
		return fmt.Errorf("%w\n%s", err, tail(log))
	}
	return nil
}

func (c *cluster) Stop(ctx context.Context, immediate bool) error {
	mode := "fast"
	if immediate {
		mode = "immediate"
	}
	return c.run(ctx, c.program("pg_ctl"), "stop", "--pgdata", c.data(), "--mode", mode, "--wait", "--silent")
}

// Kill freezes all processes first. Without the postmaster, a commit that waits for a standby ends at once, and those that are
// killed later answer by what it wrote.
func (c *cluster) Kill(ctx context.Context) error {
	if err := c.Freeze(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience) // a process stays where its parent does not look after it
	defer cancel()
	for pids := c.processes(); len(pids) > 0; pids = c.processes() {
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		for _, pid := range pids { // until the last trace of it is gone, or pg_ctl takes it for alive
			for !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
				if err := ctx.Err(); err != nil {
					return err
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	for _, name := range c.lockFiles() {
		if file, err := os.Stat(name); err == nil && file.Size() == 0 {
			if err := os.Remove(name); err != nil { // killed before it was written: PostgreSQL leaves that to us
				return err
			}
		}
	}
	return nil
}

func (c *cluster) Freeze(context.Context) error {
	if err := needProcesses(); err != nil {
		return err
	}
	frozen := map[int]bool{}
	for found := true; found; { // one may have been starting another
		found = false
		for _, pid := range c.processes() {
			if frozen[pid] {
				continue
			}
			found = true
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
				return err
			}
			frozen[pid] = true
		}
	}
	return nil
}

func (c *cluster) Thaw(context.Context) error {
	for _, pid := range c.processes() {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

func needProcesses() error {
	if _, err := os.Stat("/proc/self/cwd"); err != nil {
		return fmt.Errorf("pgtest: to find a server's processes takes /proc: %w", errors.ErrUnsupported)
	}
	return nil
}

func (c *cluster) lockFiles() []string {
	return []string{filepath.Join(c.data(), "postmaster.pid"), filepath.Join(c.dir, ".s.PGSQL.5432.lock")}
}

// processes finds the server's by their working directory, which is the data directory.
func (c *cluster) processes() (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if dir, err := os.Readlink(link); err == nil && dir == c.data() {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			pids = append(pids, pid)
		}
	}
	return pids
}

func (c *cluster) Close() error {
	_ = c.Thaw(context.Background()) // the guard can do that too, but takes longer
	if err := c.guard.release(); err != nil {
		return fmt.Errorf("pgtest: remove %s: %w", c.dir, err)
	}
	return nil
}

func (c *cluster) data() string { return filepath.Join(c.dir, "data") }
func (c *cluster) log() string  { return filepath.Join(c.dir, "log") }

func (c *cluster) program(name string) string { return filepath.Join(c.bin, name) }

func (c *cluster) run(ctx context.Context, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = c.dir // the unprivileged user may not be allowed into ours
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.owner}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, fs.ErrPermission) && c.owner != nil {
		return fmt.Errorf("%w: root runs PostgreSQL as user %d, who has to be able to get there", err, c.owner.Uid)
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", filepath.Base(program), err, out)
	}
	return nil
}

// unprivileged returns who runs PostgreSQL when we are root, nil when we are not.
func unprivileged() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		if account, err = user.Lookup("nobody"); err != nil {
			return nil, fmt.Errorf("PostgreSQL does not run as root, and there is no user postgres or nobody: %w", err)
		}
	}
	uid, err := strconv.ParseUint(account.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(account.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// CPUTime returns the seconds of CPU time that servers, by their first processes, have used until now.
func CPUTime(postmasters ...int) (seconds float64) {
	all, _ := procfs.AllProcs()
	for _, p := range all {
		stat, err := p.Stat() // else it has ended
		switch {
		case err == nil && slices.Contains(postmasters, stat.PID): // and children of it that have ended
			seconds += stat.CPUTime() + float64(stat.CUTime+stat.CSTime)/100 // USER_HZ is 100 on all Linux
		case err == nil && slices.Contains(postmasters, stat.PPID):
			seconds += stat.CPUTime()
		}
	}
	return seconds
}
