package pgtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"
)

const (
	oldest = 15
	newest = 18
)

// findBinaries returns the directory of initdb and pg_ctl, installing PostgreSQL when there is none and apt-get can.
func findBinaries(ctx context.Context) (string, error) {
	if bin := os.Getenv("RATELIMIT_PG_BIN"); bin != "" {
		if major(ctx, bin) == 0 {
			return "", fmt.Errorf("RATELIMIT_PG_BIN: no PostgreSQL %d to %d in %s", oldest, newest, bin)
		}
		return filepath.Abs(bin)
	}
	if bin := installed(ctx); bin != "" {
		return bin, nil
	}
	if err := aptInstall(ctx, "postgresql"); err != nil {
		return "", fmt.Errorf("%w: no PostgreSQL %d to %d in PATH or %s, and %w", errAbsent, oldest, newest, places[0], err)
	}
	if bin := installed(ctx); bin != "" {
		return bin, nil
	}
	return "", fmt.Errorf("%w: the PostgreSQL that apt-get installs is not one of %d to %d", errAbsent, oldest, newest)
}

// Where packages put binaries that are not in PATH: Debian, Red Hat, Homebrew.
var places = []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin"}

func installed(ctx context.Context) string {
	if initdb, err := exec.LookPath("initdb"); err == nil {
		if initdb, err = filepath.EvalSymlinks(initdb); err == nil { // to the libraries' neighbour
			if bin := filepath.Dir(initdb); major(ctx, bin) != 0 {
				return bin
			}
		}
	}
	versions := map[string]int{}
	var bins []string
	for _, place := range places {
		found, _ := filepath.Glob(place)
		for _, bin := range found {
			if versions[bin] = major(ctx, bin); versions[bin] != 0 {
				bins = append(bins, bin)
			}
		}
	}
	if len(bins) == 0 {
		return ""
	}
	return slices.MaxFunc(bins, func(a, b string) int { return cmp.Compare(versions[a], versions[b]) })
}

var versionNumber = regexp.MustCompile(`PostgreSQL\) (\d+)`)

// major returns the major version of the binaries in a directory, 0 when it is not one we support.
func major(ctx context.Context, bin string) int {
	for _, program := range []string{"initdb", "pg_ctl"} {
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			return 0
		}
	}
	out, err := exec.CommandContext(ctx, filepath.Join(bin, "postgres"), "--version").Output()
	if err != nil {
		return 0
	}
	match := versionNumber.FindSubmatch(out)
	if match == nil {
		return 0
	}
	version, _ := strconv.Atoi(string(match[1]))
	if version < oldest || version > newest {
		return 0
	}
	return version
}

// prepareExtensions installs pg_cron and plpgsql_check where Debian's packages of the same major
// version can be had, and reports whether pg_cron is there. Tests that need what is missing say so.
func prepareExtensions(ctx context.Context, bin string) (cron bool) {
	packages := map[string]string{"pg_cron.so": "cron", "plpgsql_check.so": "plpgsql-check"}
	for library, name := range packages {
		if hasLibrary(bin, library) {
			delete(packages, library)
			continue
		}
		packages[library] = fmt.Sprintf("postgresql-%d-%s", major(ctx, bin), name)
	}
	if ok, _ := filepath.Match(places[0], bin); ok && len(packages) > 0 {
		for _, name := range packages {
			if err := aptInstall(ctx, name); err != nil {
				fmt.Fprintf(os.Stderr, "pgtest: going on without %s: %v\n", name, err)
			}
		}
	}
	return hasLibrary(bin, "pg_cron.so")
}

func hasLibrary(bin, library string) bool {
	for _, lib := range []string{"../lib", "../lib/postgresql"} {
		if _, err := os.Stat(filepath.Join(bin, lib, library)); err == nil {
			return true
		}
	}
	return false
}

// Program returns the path of a program, installing the Debian package of its name when it is absent.
func Program(ctx context.Context, name string) (string, error) {
	find := func() string {
		for _, name := range []string{name, "/usr/sbin/" + name} {
			if path, err := exec.LookPath(name); err == nil {
				return path
			}
		}
		return ""
	}
	if path := find(); path != "" {
		return path, nil
	}
	if err := aptInstall(ctx, name); err != nil {
		return "", fmt.Errorf("%s is not on this machine, and %w", name, err)
	}
	if path := find(); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("the package %s has no program of that name", name)
}

// Install installs Debian packages.
func Install(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := aptInstall(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// asRoot returns what to write before a command that takes root.
func asRoot(ctx context.Context) ([]string, error) {
	if os.Geteuid() == 0 {
		return nil, nil
	}
	sudo := []string{"sudo", "--non-interactive"}
	if err := exec.CommandContext(ctx, sudo[0], sudo[1], "true").Run(); err != nil {
		return nil, errors.New("it takes root or passwordless sudo")
	}
	return sudo, nil
}

// Lock waits until no other process has the lock of a file or directory. Close ends it.
func Lock(path string) (io.Closer, error) {
	lock, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

func aptInstall(ctx context.Context, name string) error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("there is no apt-get")
	}
	sudo, err := asRoot(ctx)
	if err != nil {
		return fmt.Errorf("installing %s: %w", name, err)
	}

	// One process at a time, so that the others find the work done.
	lock, err := Lock("/var/lib/dpkg")
	if err != nil {
		return err
	}
	defer lock.Close()

	fmt.Fprintf(os.Stderr, "pgtest: installing %s with apt-get\n", name)
	apt := func(args ...string) error {
		// Runlevel 1 keeps a package from starting a server of its own.
		args = slices.Concat(sudo, []string{"env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1",
			"apt-get", "--quiet", "--quiet", "--option", "DPkg::Lock::Timeout=300"}, args)
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get: %w\n%s", err, out)
		}
		return nil
	}
	install := func() error { return apt("install", "--yes", "--no-install-recommends", name) }
	if install() == nil { // with the package lists that are there
		return nil
	}
	if err := apt("update"); err != nil {
		return err
	}
	return install()
}
