// Command pgratelimit serves token bucket rate limits that live in PostgreSQL, installs them, and asks them.
//
//	pgratelimit serve
//	pgratelimit install
//	pgratelimit acquire api user:42 --cost 5
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgratelimit/pgratelimit/server/internal/nearest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) (code int) {
	var p program
	root := p.command()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	needShell(root)
	err := root.ExecuteContext(ctx)
	if code = exitCode(err); err != nil && code != exitNo && !errors.As(err, new(shownError)) {
		p.json = p.json || slices.Contains(args, "--json") // which is not read where a flag before it is wrong
		p.complain(stderr, err)
	}
	return code
}

// A program has the flags of all commands.
type program struct {
	databaseURL string
	shardURLs   string // of databases that the program has created
	json        bool
}

func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgratelimit",
		Short: "Token bucket rate limits that live in PostgreSQL",
		Long: `Token bucket rate limits that live in PostgreSQL.

Exit codes:
   0  done; allowed; nothing to complain of
   1  an error
   2  no error, but a no: denied, doctor has findings, or apply --dry-run a difference
  64  the command line is wrong
  69  the database cannot be reached`,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(flagError)
	root.PersistentFlags().StringVar(&p.databaseURL, "database-url", "", "the database (default $DATABASE_URL, or all of $SHARD_URLS)")
	root.PersistentFlags().BoolVar(&p.json, "json", false, "print JSON")
	root.AddCommand(
		p.serve(), p.health(),
		p.install(), p.uninstall(), p.apply(), p.export(),
		p.policies(), p.override(), p.reset(),
		p.status(), p.holders(), p.doctor(),
		p.acquire(), p.peek(),
		p.version(),
	)
	root.Args = checkArguments
	for _, c := range root.Commands() {
		c.Args = checkArguments
	}
	return root
}

// needShell makes completion without a shell an error: its help would end up in the script. Call it when root has its output.
func needShell(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		return
	}
	completion.Args = cobra.ArbitraryArgs
	completion.RunE = func(*cobra.Command, []string) error {
		return usageError{errors.New("which shell? Write pgratelimit completion bash, zsh, fish or powershell")}
	}
}

// checkArguments compares arguments with the names in Use. A name in brackets is optional.
func checkArguments(c *cobra.Command, given []string) error {
	names := strings.Fields(c.Use)[1:]
	needed := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name[0] == '[' })
	var text string
	switch {
	case !c.HasParent() && len(given) > 0:
		return usageError{fmt.Errorf("no command is called %q: %s", given[0], meant(c, given[0], commandsOf(c)))}
	case len(given) < len(needed):
		text = "no " + strings.Join(needed[len(given):], " and no ") + " is given"
	case len(given) > len(names):
		text = fmt.Sprintf("%q is one argument too many: write a text with spaces in quotes, and the value of a flag after =", given[len(names)])
	default:
		return nil
	}
	return usageError{fmt.Errorf("%s\nusage: %s", text, strings.TrimSpace(c.UseLine()))}
}

// flagError describes an error of a flag in words of this program.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	var wrong *pflag.InvalidValueError
	var bare *pflag.ValueRequiredError
	switch {
	case errors.As(err, &unknown):
		var names []string
		c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
		name := "--" + unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			name = name[1:]
		}
		if name == "--version" || name == "-v" {
			err = fmt.Errorf("no flag is called %s: write pgratelimit version", name)
			break
		}
		err = fmt.Errorf("no flag is called %s: %s", name, meant(c, name, names))
	case errors.As(err, &wrong):
		err = fmt.Errorf("--%s is %q: write %s", wrong.GetFlag().Name, wrong.GetValue(), valueOf(wrong.GetFlag(), wrong.Unwrap().Error()))
	case errors.As(err, &bare):
		err = fmt.Errorf("--%s has no value: write %s", bare.GetFlag().Name, valueOf(bare.GetFlag(), bare.GetFlag().Usage))
	}
	return usageError{err}
}

func valueOf(f *pflag.Flag, otherwise string) string {
	switch f.Value.Type() {
	case "int", "int32", "int64":
		return "a whole number, such as --" + f.Name + " 5"
	case "bool":
		return "true or false, or --" + f.Name + " alone"
	}
	return otherwise
}

func commandsOf(c *cobra.Command) (names []string) {
	for _, command := range c.Commands() {
		names = append(names, command.Name())
	}
	return names
}

// meant returns the remedy for an unknown name.
func meant(c *cobra.Command, wrong string, names []string) string {
	if near := nearest.Of(wrong, names); near != "" {
		return "did you mean " + near + "?"
	}
	return "see " + c.CommandPath() + " --help"
}

func (p *program) version() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which release this program is",
		RunE: func(c *cobra.Command, _ []string) error {
			var v struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Version, v.Go = info.Main.Version, info.GoVersion
			}
			return p.print(c, v, fmt.Sprintf("pgratelimit %s, built with %s", v.Version, v.Go))
		},
	}
}
