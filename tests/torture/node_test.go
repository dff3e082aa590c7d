package torture

import (
	"math/rand/v2"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// Callers of the Node client share a pool whose sessions are killed and whose connections are delayed, cut and reset, and lose
// replies. No token is minted, and none is missing beyond the costs of requests without an answer.
func TestTorture_Node(t *testing.T) {
	run := kit.Torture(t, 1)
	db := kit.NewDB(t)
	proxy := newProxy(t, db)
	proxy.Plan(odds{kit.Delay: 200, kit.Cut: 20, kit.Reset: 20, kit.Swallow: 20}.random(rand.New(rand.NewPCG(kit.TestSeed(t), 0))))
	kit.RunNode(t, db.URL, []string{"RATELIMIT_TEST_PROXY=" + proxy.Listener.Addr().String()}, "node", "--test", "test/storm.test.js")
	run.Figures("delays", proxy.Done[kit.Delay].Load(), "cuts", proxy.Done[kit.Cut].Load(),
		"resets", proxy.Done[kit.Reset].Load(), "swallowed replies", proxy.Done[kit.Swallow].Load())
}
