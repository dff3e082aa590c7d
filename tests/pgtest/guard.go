package pgtest

import (
	"errors"
	"io"
	"os/exec"
	"syscall"
)

// A guard is a shell that waits for the end of its standard input, which comes when this process
// closes it or dies, however that happens, and then runs a script. A line of input dismisses it.
type guard struct {
	cmd   *exec.Cmd
	alive io.WriteCloser
}

// startGuard starts a guard as another user, or as oneself when owner is nil.
func startGuard(owner *syscall.Credential, script string, args ...string) (*guard, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", "if read -r dismissed; then exit; fi\n" + script, "guard"}, args...)...)
	cmd.Dir = "/" // where every user may be
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: owner,
		Setpgid:    true, // Ctrl-C is for the tests
	}
	alive, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return &guard{cmd: cmd, alive: alive}, cmd.Start()
}

// release lets it run its script, and waits for that.
func (g *guard) release() error { return errors.Join(g.alive.Close(), g.cmd.Wait()) }

// dismiss ends it without.
func (g *guard) dismiss() error {
	_, err := io.WriteString(g.alive, "\n")
	return errors.Join(err, g.release())
}
