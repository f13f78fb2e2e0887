/* inside_main.c - the main program of inside.c.  Tests that use only public functions link with its amp.h as well. */
int inside(int argc, char **argv);
int main(int argc, char **argv) { return inside(argc, argv); }
