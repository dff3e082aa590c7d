package pgtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// PrivateOnDisk is Private with the data on a disk of its own, a tmpfs of so many megabytes whose
// directory it returns. Where that cannot be, the test is skipped.
func PrivateOnDisk(t testing.TB, megabytes int, settings ...string) (server *Server, dir string) {
	t.Helper()
	if Shared(t).Rung == rungDocker {
		t.Skip("a container's data is on a disk of the Docker engine")
	}
	dir = mount(t, megabytes)
	start := func(ctx context.Context, settings []string) (host, error) { return startClusterIn(ctx, dir, settings) }
	return private(t, []rung{{rungLocal, start}}, settings), dir
}

// mount mounts a tmpfs until the test ends or this process dies.
func mount(t testing.TB, megabytes int) (dir string) {
	t.Helper()
	sudo, err := asRoot(t.Context())
	if err != nil {
		t.Skipf("mounting a tmpfs: %v", err)
	}
	if dir, err = os.MkdirTemp(tempDir, "disk-"); err != nil {
		t.Fatal(err)
	}
	command := slices.Concat(sudo, []string{"mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm,mode=1777", megabytes), "tmpfs", dir})
	if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
		os.Remove(dir)
		t.Skipf("mounting a tmpfs: %v: %s", err, out)
	}
	// When this process dies, so does the server, and until then the disk is busy.
	guard, err := startGuard(nil, `
		dir=$1; shift
		for try in 1 2 3 4 5 6 7 8 9; do "$@" umount "$dir" && break; sleep 1; done
		rmdir "$dir"`, slices.Concat([]string{dir}, sudo)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := guard.release(); err != nil {
			t.Errorf("unmounting %s: %v", dir, err)
		}
	})
	return dir
}
