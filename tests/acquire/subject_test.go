package acquire

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// onEach runs a test against a database and against the fake.
func onEach(t *testing.T, test func(t *testing.T, db kit.Subject)) {
	kit.InParallel(t, kit.Subjects, func(t *testing.T, open func(t testing.TB) kit.Subject) { test(t, open(t)) })
}
